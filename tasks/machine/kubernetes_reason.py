"""What Kubernetes said of the container that ran before this one, as far as the environment carries it.

Owns the name of the variable. Refuses to ask the Kubernetes API: a trainer needs no rights there.

A pod's downward API has no field for `lastState.terminated.reason`, but it has one for annotations, and a container
that is started again reads them again. So whoever may read pods (an operator, a start script with `get pods`)
annotates, and the container declares:

    env:
      - name: CAIRN_KUBERNETES_REASON
        valueFrom: {fieldRef: {fieldPath: "metadata.annotations['cairn/termination-reason']"}}

A start script that may read its own pod can as well export the variable itself, from
`kubectl get pod "$POD" -o jsonpath='{.status.containerStatuses[0].lastState.terminated.reason}'`.
"""

from collections.abc import Mapping

VARIABLE = "CAIRN_KUBERNETES_REASON"


def kubernetes_reason(environment: Mapping[str, str]) -> str:
    """Return why Kubernetes ended the previous container (`OOMKilled`, `Evicted`, …), or nothing where it is unknown.

    It belongs to the attempt that was found open, never to the one that reads it.
    """
    return environment.get(VARIABLE, "").strip()
