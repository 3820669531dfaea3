"""The flow `tokenize-part`: tokenize one of several parts of a run's text, so that machines share the work."""

import os

from prefect import flow

from cairn.flows.orchestrator import deployments, flow_run, flow_run_tags, server_setup
from cairn.flows.preparation.training_request import TrainingRequest, resolve_request
from cairn.flows.run.steps import Chain
from cairn.storage.stores.open_store import open_store
from cairn.tasks import tokenize_and_split
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.policy.termination import FlowEnd


@flow(name="tokenize-part", retries=0, persist_result=False)
@flow_run.as_prefect_state
def tokenize_part(
    config: deployments.Config = "quickstart",
    part: deployments.Part = 1,
    of: deployments.Parts = 1,
    overrides: deployments.Overrides = (),
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
) -> FlowEnd:
    """Tokenize one part of a text into the store; the run that is started then takes it from there.

    Args:
        config: run configuration (TOML): a name in deployments/, a path, or a URL; its tokenizer is a file or bytes.
        part: the part that this flow run does, from 1 on.
        of: into how many parts the text is divided.
        overrides: `section.key=value` on top of the configuration, one each.
        store: folder or URL of the object store; empty: CAIRN_STORE, else the configuration's, else ./cairn-store.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
    """
    flow_run_tags.introduce(f"tokenize part {part} of {of}")
    server_setup.take_credentials(store_credentials, os.environ)
    resolved = resolve_request(TrainingRequest(config=config, overrides=overrides, store=store), os.environ)
    assert resolved.configuration is not None  # without one the request was refused
    given = (resolved.configuration.data, resolved.base_dir, work_folder(os.environ), open_store(resolved.store_url))
    return flow_run.completed(Chain().as_task(tokenize_and_split.tokenize_part)(part, of, *given))
