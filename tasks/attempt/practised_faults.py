"""Which faults of `CAIRN_FAULTS` were injected, by markers in the run's folder: practice is shown as such."""

from contextlib import suppress
from dataclasses import dataclass

from cairn.storage.errors import StorageError
from cairn.storage.logs.run_entries import AttemptStarted
from cairn.storage.stores import document, object_store


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marker:
    attempt: int


def fault_marker(run_prefix: str, kind: str, number: int) -> str:
    """Return the key of the object that exists once this fault was injected."""
    return f"{run_prefix}/faults/{kind}-{number}.json"


def mark_fault(store: object_store.ObjectStore, key: str, attempt: int) -> bool:
    """Create the marker of a fault that is about to be injected; returns False if it was injected before."""
    return store.create(key, document.encode(_Marker(attempt=attempt)))


def practised_faults(store: object_store.ObjectStore, run_prefix: str, started: AttemptStarted) -> tuple[str, ...]:
    """Return the faults that were injected into the attempt, such as `kill@300`; none where they cannot be read."""
    if not started.faults:
        return ()
    with suppress(StorageError):
        keys = [key for key in store.keys(f"{run_prefix}/faults") if not key.endswith("-go.json")]  # that ends a pause
        markers = {key: document.decode(store.read(key), _Marker, where=key) for key in keys}
        mine = [key for key, marker in markers.items() if marker.attempt == started.attempt]
        named = (key.rpartition("/")[2].removesuffix(".json").rpartition("-") for key in mine)
        return tuple(f"{kind}@{number}" for number, kind in sorted((int(number), kind) for kind, _, number in named))
    return ()


def practised_evaluation(store: object_store.ObjectStore, run_prefix: str, faults: str, number: int) -> str:
    """Return the fault that was injected into the evaluator of this number, such as `evaluator@2`, or ""."""
    fault = f"evaluator@{number}"
    if fault not in (item.strip() for item in faults.split(",")):
        return ""
    with suppress(StorageError):
        return fault if store.size(fault_marker(run_prefix, "evaluator", number)) is not None else ""
    return ""
