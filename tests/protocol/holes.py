"""Starting states in which a copy of the store is under way: an entry is missing before the newest of its log.

Every process is refused by name and writes nothing there; once the entry is back, all goes on (`invariants.examine`).
"""

from functools import partial

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import entry_name
from tests.protocol import processes, scenarios
from tests.protocol.processes import ALIAS, PREFIX, Act, Process
from tests.protocol.raw_history import Violation, read_raw
from tests.protocol.scenarios import Scenario

_RUN_LOG, _MODEL_LOG = f"{PREFIX}/log", f"models/{ALIAS}/log"
_CACHES = (f"{PREFIX}/fold.json", f"models/{ALIAS}/fold.json")


def hole(before: Act, log: str, from_newest: int, process: Process) -> None:
    """The world of another scenario without its caches and one entry, `from_newest` before the newest."""
    before(process)
    for key in _CACHES:
        process.store.inner.delete(key)
    newest = read_raw(process.store.inner, log)[-1]["seq"]
    key = f"{log}/{entry_name(newest - from_newest)}"
    process.ledger.missing[key] = process.store.inner.read(key)
    process.store.inner.delete(key)


def named(act: Act, process: Process) -> None:
    """Act in vain: the missing entry is named."""
    (key,) = process.ledger.missing
    try:
        act(process)
    except IntegrityError as error:
        if process.store.inner.size(key) is not None:
            raise Violation(f"a hole is not written into: {error}") from error
        if key not in str(error):
            raise  # something else was read wrongly
        process.ledger.acknowledge(f"refused: {key}")
    else:
        raise Violation(f"a hole is not written into: nothing was said of {key}")


def _open_and_train(process: Process) -> None:
    processes.open_run(process)
    processes.train(process, commits=1)


def _scenario(name: str, before: Act, log: str, from_newest: int, act: Act) -> Scenario:
    return Scenario(name, partial(hole, before, log, from_newest), partial(named, act))


HOLES = (
    _scenario("resume-over-a-hole", scenarios.ended, _RUN_LOG, 1, scenarios.act_resume),
    _scenario("take-over-over-a-hole", scenarios.owned, _RUN_LOG, 2, _open_and_train),
    _scenario("open-over-a-missing-beginning", scenarios.ended, _RUN_LOG, 4, _open_and_train),
    _scenario("commit-over-a-hole", scenarios.staged, _RUN_LOG, 1, scenarios.act_commit),
    _scenario("promote-over-a-hole", scenarios.promoted, _MODEL_LOG, 1, scenarios.act_promote_oldest),
    _scenario("roll-back-over-a-hole", scenarios.promoted, _MODEL_LOG, 1, processes.go_back),
    _scenario("sweep-over-a-hole-of-an-alias", scenarios.promoted, _MODEL_LOG, 1, processes.sweep),
)
