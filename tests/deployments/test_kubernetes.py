"""What would be sent to a cluster: Prefect's own worker renders it, the Kubernetes schemas judge it."""

import asyncio
import functools
import json
import re
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import yaml

from cairn.model.estimates.size_estimate import checkpoint_bytes
from cairn.tasks.configuration.configuration_source import load_configuration
from cairn.tasks.policy.termination import ExitCode

FOLDER = Path(__file__).parents[2] / "deployments" / "kubernetes"
TEMPLATE = json.loads((FOLDER / "job-template.json").read_text(encoding="utf-8"))
DEPLOYMENTS = yaml.safe_load((FOLDER / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
VARIABLES = {str(item["name"]): item["work_pool"]["job_variables"] for item in DEPLOYMENTS}
OLDEST, NEWEST = "1.30", "1.37"
MANIFESTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}-{document['metadata']['name']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.stem not in ("prefect", "kustomization", "queue")
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


DOCUMENTS: dict[tuple[str, str], dict[str, Any]] = {
    (str(document["kind"]), str(document["metadata"]["name"])): document
    for document in (parameter.values[0] for parameter in MANIFESTS)
    if isinstance(document, dict)
}
MULTI_NODE = DOCUMENTS["Job", "cairn-bard"]
QUEUE = list(yaml.safe_load_all((FOLDER / "queue.yaml").read_text(encoding="utf-8")))


def rendered(**job_variables: Any) -> dict[str, Any]:
    """Return the Job that Prefect's worker would create for a flow run."""
    from prefect.client.schemas.objects import Flow, FlowRun
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    no_api: Any = object()  # asked only for blocks, which the template names none of; without it a server would start
    rendering = KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, job_variables, client=no_api)
    configuration = asyncio.run(rendering)
    flow = Flow(name="train-gpt")
    flow_run = FlowRun(id=uuid4(), flow_id=flow.id, name="bard, attempt 2")
    configuration.prepare_for_flow_run(flow_run, flow=flow, worker_name="cairn-worker")
    manifest: dict[str, Any] = json.loads(json.dumps(configuration.job_manifest))
    return manifest


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return pod


def environment_of(manifest: dict[str, Any]) -> dict[str, str]:
    (container,) = pod_of(manifest)["containers"]
    return {item["name"]: item["value"] for item in container["env"]}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The Job of the template's own defaults."""
    return rendered()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_every_manifest_is_one_that_kubernetes_knows(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@functools.cache
def job_of(deployment: str) -> dict[str, Any]:
    """Return the Job of a deployment, which nobody changes."""
    return rendered(**VARIABLES[deployment])


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("deployment", VARIABLES)
def test_the_job_of_every_deployment_is_one_that_kubernetes_knows(deployment: str, version: str) -> None:
    manifest = job_of(deployment)
    kubernetes_validate.validate(manifest, version, strict=True)
    assert "{{" not in json.dumps(manifest)


def test_the_schemas_do_refuse_what_is_wrong(job: dict[str, Any]) -> None:
    wrong = json.loads(json.dumps(job))
    pod_of(wrong)["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_every_variable_of_the_template_is_used_and_every_use_is_a_variable() -> None:
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(TEMPLATE["job_configuration"])))
    assert used == set(TEMPLATE["variables"]["properties"])


def test_a_job_is_tried_once_by_one_pod(job: dict[str, Any]) -> None:
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["parallelism"], spec["completions"]) == (0, 1, 1)
    assert pod_of(job)["restartPolicy"] == "Never"


def test_prefect_does_not_schedule_a_preempted_flow_run_again_by_itself(job: dict[str, Any]) -> None:
    assert environment_of(job)["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "crash"


def test_the_grace_is_longer_than_what_the_run_takes_to_commit(job: dict[str, Any]) -> None:
    checkpoint = load_configuration(FOLDER / "trainer.toml", overrides=(), environment={}).checkpoint
    assert pod_of(job)["terminationGracePeriodSeconds"] > checkpoint.grace_seconds + 30


def test_the_hook_writes_the_file_that_the_trainer_waits_for(job: dict[str, Any]) -> None:
    (container,) = pod_of(job)["containers"]
    notice_file = environment_of(job)["CAIRN_PREEMPTION__NOTICE_FILE"]
    assert f"touch {notice_file};" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(notice_file).parent), environment_of(job)["CAIRN_CACHE"]} <= mounted


def test_the_pods_environment_is_a_configuration_that_is_accepted(job: dict[str, Any]) -> None:
    config = load_configuration(FOLDER / "trainer.toml", overrides=(), environment=environment_of(job))
    assert (config.preemption.notice_file, config.preemption.poll_seconds) == ("/run/cairn/preempted", 1.0)


def test_a_gpu_and_its_node_are_asked_for_unless_the_deployment_needs_none(job: dict[str, Any]) -> None:
    (container,) = pod_of(job)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod_of(job)["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    small = pod_of(job_of("watch-runs"))
    (container,) = small["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == 0
    assert not small.get("nodeSelector")


def test_a_node_can_be_chosen_for_one_flow_run() -> None:
    chosen = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert pod_of(rendered(node_selector=chosen))["nodeSelector"] == chosen


def test_what_is_secret_comes_from_the_secret_and_stands_in_no_manifest(job: dict[str, Any]) -> None:
    (container,) = pod_of(job)["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "cairn"}}]
    assert [name for name in environment_of(job) if re.search("AUTH|KEY|SECRET|PASSWORD|TOKEN", name)] == []


def test_the_trainer_has_no_rights_in_the_cluster_and_is_not_root(job: dict[str, Any]) -> None:
    for pod in (pod_of(job), pod_of(MULTI_NODE)):
        assert (pod["automountServiceAccountToken"], pod["securityContext"]["runAsNonRoot"]) == (False, True)
        tokens = {
            volume["name"]
            for volume in pod["volumes"]
            if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", ()))
        }
        (container,) = pod["containers"]
        assert not tokens & {mount["name"] for mount in container["volumeMounts"]}


def test_the_init_container_may_list_pods_and_nothing_else(job: dict[str, Any]) -> None:
    assert {pod_of(manifest)["serviceAccountName"] for manifest in (job, MULTI_NODE)} == {"cairn-trainer"}
    assert DOCUMENTS["Role", "cairn-trainer"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    ]
    bindings = [document for (kind, _), document in DOCUMENTS.items() if kind == "RoleBinding"]
    bound = {(item["subjects"][0]["name"], item["roleRef"]["name"]) for item in bindings}
    assert bound == {("cairn-trainer", "cairn-trainer"), ("cairn-worker", "cairn-worker")}


def test_what_the_init_container_writes_is_what_the_trainer_reads(job: dict[str, Any]) -> None:
    for manifest in (job, MULTI_NODE):
        (first,), (container,) = pod_of(manifest)["initContainers"], pod_of(manifest)["containers"]
        program, path = first["args"][1:]
        assert (FOLDER.parents[1] / program).is_file()
        assert {"name": "CAIRN_ENDED_PODS", "value": path} in container["env"]
        folders = [{mount["name"]: mount["mountPath"] for mount in item["volumeMounts"]} for item in (first, container)]
        assert {folder["notice"] for folder in folders} == {str(Path(path).parent)}


def answer(exit_code: int, *, disrupted: bool) -> str:
    """What the Job controller does about a pod that ended so: the first rule that fits decides."""
    for rule in MULTI_NODE["spec"]["podFailurePolicy"]["rules"]:
        if (disrupted and rule.get("onPodConditions")) or exit_code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize("exit_code", [1, 4, 75, 137])
def test_a_pod_whose_node_is_taken_away_is_made_again_whatever_its_container_said(exit_code: int) -> None:
    assert answer(exit_code, disrupted=True) == "Ignore"


def test_every_exit_code_of_the_command_has_an_answer_that_spends_no_backoff() -> None:
    answers = {int(code): answer(int(code), disrupted=False) for code in ExitCode if code}
    assert answers == {
        **dict.fromkeys((1, 2, 3, 4, 5, 6), "FailJob"),
        **dict.fromkeys((7, 75, 130), "Ignore"),
    }
    assert [answer(128 + number, disrupted=False) for number in (signal.SIGKILL, signal.SIGTERM)] == ["Ignore"] * 2


def test_pods_of_several_machines_may_stand_where_those_of_one_may(job: dict[str, Any]) -> None:
    assert pod_of(MULTI_NODE)["tolerations"] == pod_of(job)["tolerations"]


def test_all_pods_of_a_run_start_or_none() -> None:
    flavor, cluster, local = QUEUE
    assert MULTI_NODE["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    assert [item["name"] for item in group["flavors"]] == [flavor["metadata"]["name"]]
    assert flavor["spec"]["nodeLabels"] == pod_of(MULTI_NODE)["nodeSelector"]


def test_every_pod_obeys_the_restricted_standard_that_the_namespace_enforces(job: dict[str, Any]) -> None:
    labels = DOCUMENTS["Namespace", "cairn"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    pods = [pod_of(item) for item in (job, *DOCUMENTS.values()) if "template" in item.get("spec", {})]
    assert len(pods) == 5
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            inner = container["securityContext"]
            assert (inner["allowPrivilegeEscalation"], inner["capabilities"]) == (False, {"drop": ["ALL"]})


def test_concurrency_leases_outlive_a_restart_of_the_server() -> None:
    pod = pod_of(DOCUMENTS["Deployment", "prefect-server"])
    (container,), (volume,) = pod["containers"], pod["volumes"]
    home = next(item["value"] for item in container["env"] if item["name"] == "PREFECT_HOME")
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": home}]
    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in DOCUMENTS


def test_the_memory_that_a_pod_asks_for_holds_the_state_that_a_resume_reads(job: dict[str, Any]) -> None:
    config = load_configuration(FOLDER / "trainer.toml", overrides=(), environment={})
    vocab_size = config.data.bpe_vocab_size
    assert vocab_size is not None
    state_bytes = checkpoint_bytes(config.model, config.training, vocab_size)
    (container,) = pod_of(job)["containers"]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] == "16Gi"
    # What is read and what was staged before it may both be there, beside torch with CUDA and Prefect.
    assert 2 * state_bytes + 4 * 2**30 < 16 * 2**30


def test_the_image_has_what_compiling_and_being_process_1_need(job: dict[str, Any]) -> None:
    recipe = (FOLDER.parent / "Containerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG PYTHON_IMAGE=\S+@sha256:[0-9a-f]{64}$", recipe, re.MULTILINE)
    assert "gcc libc6-dev tini" in recipe and 'ENTRYPOINT ["tini", "--"]' in recipe
    containers = [*pod_of(MULTI_NODE)["containers"], *pod_of(job)["containers"]]
    assert [container for container in containers if "command" in container] == [], "a command would go past tini"


def test_both_prefect_files_deploy_the_same_flows_to_the_same_queues_with_the_same_triggers() -> None:
    here = yaml.safe_load((FOLDER.parents[1] / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert [_compared(item) for item in here] == [_compared(item) for item in sorted(DEPLOYMENTS, key=_as_in(here))]


def _compared(deployment: dict[str, Any]) -> tuple[Any, ...]:
    queue = deployment["work_pool"]["work_queue_name"]
    schedules, triggers = deployment.get("schedules"), deployment.get("triggers")
    return deployment["name"], deployment["entrypoint"], deployment["tags"], queue, schedules, triggers


def _as_in(others: list[dict[str, Any]]) -> Any:
    names = [item["name"] for item in others]
    return lambda item: names.index(item["name"])
