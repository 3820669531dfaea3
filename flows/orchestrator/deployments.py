"""The deployments of a prefect.yaml: the type, rule and title of each parameter, and how they are registered.

Prefect's form and API check the parameters before a flow run. Their descriptions stand in the flows' docstrings, or
here if they name configuration keys; as schema extras, because Prefect overwrites those of a field. A rule that no type
says is an `else` branch with a constant: Prefect answers with it.

Deployments and automations are registered without undoing what a person has set. `prefect deploy` writes every field
again. Here a setting is written only if the code changed it since it was deployed and nobody else did: a variable of
the server has the digest of each setting as it was deployed last.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

from prefect import Flow, events, exceptions
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import actions, objects, responses
from prefect.client.schemas.schedules import SCHEDULE_TYPES, construct_schedule
from prefect.events.schemas.automations import AutomationCore
from prefect.utilities.callables import parameter_schema
from pydantic import Field, TypeAdapter

from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.key_reference import keys_by_name

_OF_THE_CODE = ("entrypoint", "parameter_openapi_schema", "pull_steps", "version")
"""No page of Prefect's changes these."""
_PARAMETER, _AUTOMATION = "parameters.", "automation "
_TRIGGER: TypeAdapter[events.DeploymentTriggerTypes] = TypeAdapter(events.DeploymentTriggerTypes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Which settings to write, which to remove, and which stay as a person has set them."""

    written: Set[str]
    removed: Set[str]
    kept: Sequence[str]


def compare(deployed: Mapping[str, str], found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Changes:
    """Compare settings as they were deployed last (digests, none where that is unknown), as they are, and as wanted."""
    now, then = digests(found), digests(wanted)
    different = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
    ours = {key for key in different if now.get(key) == deployed.get(key) or key in _OF_THE_CODE}
    return Changes(written=ours & then.keys(), removed=ours - then.keys(), kept=sorted(different - ours))


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each setting's JSON."""
    return {key: sha256(json.dumps(value, sort_keys=True).encode())[:12] for key, value in settings.items()}


async def read_deployed(client: PrefectClient, name: str) -> dict[str, str]:
    """Return the digests of what was deployed last under this name of a variable; none where it is not known."""
    found = await client.read_variable_by_name(name)
    return {key: str(value) for key, value in found.value.items()} if found and isinstance(found.value, dict) else {}


async def remember_deployed(client: PrefectClient, name: str, wanted: Mapping[str, Any]) -> None:
    """Keep the digests of what is deployed now."""
    if await client.read_variable_by_name(name) is None:
        await client.create_variable(actions.VariableCreate(name=name, value=digests(wanted), tags=["cairn"]))
    else:
        await client.update_variable(actions.VariableUpdate(name=name, value=digests(wanted)))


async def deploy(client: PrefectClient, item: Mapping[str, Any]) -> Sequence[str]:
    """Register a deployment of the file; return what was changed, and what stays as a person has set it."""
    module, _, attribute = item["entrypoint"].rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), attribute)
    name, wanted, said = f"{flow.name}/{item['name']}", _wanted_settings(item, flow), list[str]()
    try:
        deployment = await client.read_deployment_by_name(name)
    except exceptions.ObjectNotFound:
        fields, flow_id = _fields(compare({}, {}, wanted), wanted, {}), await client.create_flow(flow)
        made = await client.create_deployment(flow_id, item["name"], **fields)
        deployment = await client.read_deployment(made)
        said.append(f"deployment {name}: made")
    automations = dict[str, AutomationCore]()
    for given in item.get("triggers", ()):
        trigger = _TRIGGER.validate_python(dict(given))
        trigger.set_deployment_id(deployment.id)
        automations[f"{_AUTOMATION}{trigger.name}"] = trigger.as_automation()
    related = await client.read_resource_related_automations(f"prefect.deployment.{deployment.id}")
    present = {f"{_AUTOMATION}{automation.name}": automation for automation in related}
    wanted |= {key: _comparable(automation) for key, automation in automations.items()}
    found = _found_settings(deployment) | {key: _comparable(automation) for key, automation in present.items()}
    variable = f"cairn_deployed_{deployment.id.hex}"
    changes = compare(await read_deployed(client, variable), found, wanted)
    if fields := _fields(changes, wanted, deployment.parameters):
        await client.update_deployment(deployment.id, actions.DeploymentUpdate(**fields))
    changed = changes.written | changes.removed
    for key in changed & (automations.keys() | present.keys()):
        old, new = present.get(key), automations.get(key)
        if new is None:
            await client.delete_automation(present[key].id)
        elif old is None:
            await client.create_automation(new)
        else:
            written = new.model_dump(exclude={"owner_resource"}) | {"enabled": old.enabled}
            await client.update_automation(old.id, AutomationCore.model_validate(written))
    await remember_deployed(client, variable, wanted)
    if changed and not said:
        said.append(f"deployment {name}: changed by the code: {', '.join(sorted(changed))}")
    if kept := [*changes.kept, *(f"{key} (off)" for key in sorted(present) if not present[key].enabled)]:
        said.append(f"deployment {name}: stays as a person has set it: {', '.join(kept)}")
    return said


def _wanted_settings(item: Mapping[str, Any], flow: Flow[..., Any]) -> dict[str, Any]:
    pool, limit = item["work_pool"], dict(item.get("concurrency_limit", {}))
    schedules = [_schedule(construct_schedule(**given), is_active=True) for given in item["schedules"]]
    return {
        **{name: item[name] for name in ("description", "entrypoint", "tags")},
        **{f"{_PARAMETER}{name}": value for name, value in item["parameters"].items()},
        "parameter_openapi_schema": parameter_schema(flow).model_dump(mode="json", exclude_unset=True),
        "version": flow.version,
        "pull_steps": [],  # the code is installed where the worker is
        "work_pool_name": pool["name"],
        "work_queue_name": pool["work_queue_name"],
        "job_variables": pool.get("job_variables", {}),
        "concurrency_limit": limit.pop("limit", None),
        "concurrency_options": objects.ConcurrencyOptions(**limit).model_dump(mode="json") if limit else None,
        "schedules": schedules,
        "paused": False,
    }


def _found_settings(deployment: responses.DeploymentResponse) -> dict[str, Any]:
    limit, options = deployment.global_concurrency_limit, deployment.concurrency_options
    same = ("description", "tags", "work_pool_name", "work_queue_name", "job_variables", "paused", *_OF_THE_CODE)
    return {
        **{name: getattr(deployment, name) for name in same},
        **{f"{_PARAMETER}{name}": value for name, value in deployment.parameters.items()},
        "concurrency_limit": limit.limit if limit else None,
        "concurrency_options": options.model_dump(mode="json") if options else None,
        "schedules": [_schedule(found.schedule, is_active=found.active) for found in deployment.schedules],
    }


def _schedule(schedule: SCHEDULE_TYPES, *, is_active: bool) -> dict[str, Any]:
    """Return a schedule without the moment that its intervals are counted from."""
    return {"schedule": schedule.model_dump(mode="json", exclude={"anchor_date"}), "active": is_active}


def _fields(changes: Changes, wanted: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to write of a deployment; a parameter that the flow has no more is removed, whoever has set it."""
    written = {key: wanted[key] for key in changes.written if not key.startswith(_AUTOMATION)}
    known = wanted["parameter_openapi_schema"]["properties"]
    parameters = {
        name: written.pop(f"{_PARAMETER}{name}", before.get(name))
        for name in known
        if f"{_PARAMETER}{name}" in written or (name in before and f"{_PARAMETER}{name}" not in changes.removed)
    }
    return written | ({"parameters": parameters} if parameters != before else {})


def _comparable(automation: AutomationCore) -> object:
    """Return what the code says of an automation: not whether it is switched on."""
    said = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    said["trigger"].pop("id", None)
    return said


_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*"
_LOCATION = (r"^(|\S|\S.*\S)$", "a path or a URL without spaces around it")
_NAME = (
    rf"^({_RUN_ID})?$",
    "letters, digits and _ . = + - with a letter, a digit or _ at the beginning; "
    'a number needs quotes of JSON inside those of the shell, as run_id="2024"',
)
_REFERENCE = (rf"^{_RUN_ID}(@\d+)?$", "an alias such as champion, RUN, or RUN@STEP")
_DEPLOYMENT = (r"^([^/\s]+/[^/\s]+)?$", "flow/deployment, such as train-gpt/train-gpt")
_OVERRIDE = (
    f"^({'|'.join(re.escape(key) for key in keys_by_name())})=",
    "section.key=value with a key that `cairn config` lists, such as training.warmup_steps=50",
)
_NAMED_KEYS = ("training.global_batch", "training.warmup_steps", "model.n_layer", "data.sources")


def _rule(pattern: str, words: str) -> dict[str, Any]:
    return {"if": {"type": "string", "pattern": pattern}, "else": {"const": words}}


def _field(title: str, *examples: str, **rules: Any) -> Any:
    return Field(json_schema_extra={"title": title, **({"examples": list(examples)} if examples else {})}, **rules)


def _text(title: str, rule: tuple[str, str], *examples: str) -> Any:
    return Field(json_schema_extra={"title": title, "examples": list(examples), **_rule(*rule)}, max_length=2048)


def _described(title: str, description: str, example: Any, **rules: Any) -> Any:
    return Field(json_schema_extra={"title": title, "description": description, "examples": [example]}, **rules)


def _setting(title: str, key: str, example: float) -> Any:
    description = f"{keys_by_name()[key].summary} ({key}), such as {example:g}; 0: as the configuration says"
    return _described(title, description, example, ge=0)


Config = Annotated[str, _text("Configuration", _LOCATION, "quickstart", "s3://bucket/runs/bard.toml")]
RunId = Annotated[str, _text("Run id", _NAME, "bard-1")]
Steps = Annotated[int, _setting("Steps", "training.steps", 1200)]
LearningRate = Annotated[float, _setting("Learning rate", "training.lr", 1e-3)]
MicroBatch = Annotated[int, _setting("Micro-batch", "training.micro_batch", 8)]
_Override = Annotated[str, Field(json_schema_extra=_rule(*_OVERRIDE))]
_ON_TOP = "on top of the configuration, one each"
Overrides = Annotated[
    tuple[_Override, ...],
    _described(
        "Overrides",
        f"`section.key=value` {_ON_TOP}, such as "
        + ", ".join(f"{key} ({keys_by_name()[key].summary})" for key in _NAMED_KEYS)
        + ". `cairn config` lists all keys. A key that is set in a field of its own as well is refused.",
        ["training.warmup_steps=50", "training.global_batch=64"],
    ),
]
SetOverrides = Annotated[
    tuple[_Override, ...],
    _described(
        "Values to combine",
        f"`section.key=value,value` {_ON_TOP}; a run is started for each combination. Values are written as in TOML: "
        "text in quotes, a list in brackets is one value.",
        ["training.lr=1e-3,3e-4", "model.n_layer=2,4"],
    ),
]
Store = Annotated[str, _text("Store", _LOCATION, "./cairn-store", "s3://bucket/cairn")]
Credentials = Annotated[str, _field("Store credentials", "bucket-of-the-team", max_length=200)]
StartOver = Annotated[bool, _field("Start over at step 0")]
Deployment = Annotated[str, _text("Deployment that continues runs", _DEPLOYMENT, "train-gpt/train-gpt")]
Part = Annotated[int, _field("Part of the text", ge=1)]
Parts = Annotated[int, _field("Number of parts", ge=1)]
Reference = Annotated[str, _text("Checkpoint", _REFERENCE, "champion", "bard-1", "bard-1@400")]
Suite = Annotated[str, _text("Suite", _LOCATION, "deployments/suites/repetition.toml")]
Again = Annotated[bool, _field("Evaluate again what was evaluated before")]
DryRun = Annotated[bool, _field("Only list what would be deleted")]
MostSeconds = Annotated[float, _field("Begin no further run after (seconds)", gt=0, le=86_400)]
