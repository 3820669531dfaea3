"""The ranks of one machine as their launcher sees them: who is left when one is lost, and who is started to join them.

The others go on without a rank that was killed once all have said `GO_ON`, and always with rank 0. The launchers of
several machines change the members in the values of the first one's, which also notices that another one is gone.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from subprocess import Popen

import msgspec
import psutil

from cairn.model.training.membership import Members
from cairn.tasks.policy.failures import PEER_LOST_EXIT_CODE
from cairn.tasks.trainer import rank_values
from cairn.tasks.trainer.trainer_protocol import RankEnded, RanksOutlived

GO_ON, LATE = "cairn/go-on", "cairn/late"
"""The values by which the ranks say that they go on without one that is killed, and which of them are to be killed."""
LAUNCHER = "launcher-"
"""Before a launcher's number: the name by which it joins the first one's values."""
_LAUNCHED, _OVER, _HUNG, _NEXT_RANK = "launched/", "over", "hung", "next-rank"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0
"""After one rank has failed, the time in which the others may exit by themselves."""
_HUNG_SECONDS = 5.0
"""The time in which ranks that hang are killed, on another machine too."""
_MOST_JOIN = 8
"""Ranks that one launcher starts in the place of lost ones: where each is killed again, something else is wrong."""


class LaunchedRanks:
    """The processes of one launcher, whose number is that of the machine; the first one's reports to the parent."""

    def __init__(
        self,
        values: rank_values.SharedValues,
        marks: rank_values.WaitingMarks,
        start: Callable[[int, int], "Popen[bytes]"],
        *,
        size: int,
        launcher: int = 0,
        gone: "SimpleQueue[str] | None" = None,
        report: Callable[[RanksOutlived], None] = lambda outlived: None,
    ) -> None:
        """Start none yet: `start` does by a rank and its number on this machine; ranks from `size` on join others.

        `gone` gets the names of those that have hung up.
        """
        self.is_hung, self._gone = threading.Event(), gone or SimpleQueue[str]()
        self._values, self._marks, self._start, self._report = values, marks, start, report
        self._size, self._launcher = size, launcher
        self._ranks, self._locals = dict[int, "Popen[bytes]"](), dict[int, int]()
        self._ended = list[RankEnded]()
        self._joined = self._answered = 0
        self._asked: tuple[float, Members] | None = None

    def start(self, ranks: Sequence[int]) -> None:
        """Start ranks; the first launcher publishes all as the members."""
        if not self._launcher:
            rank_values.change_members(self._values, lambda _: Members(ranks=tuple(range(self._size))))
        for local, rank in enumerate(ranks):
            self._run(rank, local)

    def next_rank(self) -> int:
        """Return a number that no rank has had."""
        request = rank_values.Request(operation="add", key=_NEXT_RANK, number=1)
        return self._size - 1 + self._values.ask(request).number

    def wait(self, *, sleep: Callable[[float], None] = time.sleep) -> RankEnded | None:
        """Wait until all have ended; two seconds after the first that failed the rest are killed. Return the cause.

        An end that the others outlive is no failure, and the cause of one only where no other is known.
        """
        grace, failed = _GRACE_SECONDS, list[RankEnded]()
        while len(self._ended) < len(self._ranks):
            known = {end.rank for end in self._ended}
            codes = [(rank, process.poll()) for rank, process in self._ranks.items() if rank not in known]
            for rank, code in codes:
                if code is not None:
                    self._ended.append(end := RankEnded(rank=rank, exit_code=code))
                    failed += [] if self._outlives(end) else [end]
            with suppress(rank_values.ValuesGone):  # the first machine is, and its end is everybody's
                self._watch_others()
            if grace <= 0:
                for process in self._ranks.values():
                    process.kill()
                    process.wait()
                break
            grace -= _POLL_SECONDS if failed else 0
            sleep(_POLL_SECONDS)
        outlived = [end for end in self._ended if end not in failed]
        return find_failed_rank([*failed, *outlived]) if failed else None

    def has_finished(self) -> bool:
        """Whether its ranks have ended because nothing is left to do; else the others go on without them."""
        with suppress(rank_values.ValuesGone):
            return rank_values.get_value(self._values, _OVER) is not None
        return True

    def _run(self, rank: int, local: int) -> None:
        self._ranks[rank], self._locals[rank] = self._start(rank, local), local
        self._publish_running()

    def _publish_running(self) -> None:
        ended = {end.rank for end in self._ended}
        running = [rank for rank in self._ranks if rank not in ended]
        rank_values.set_value(self._values, f"{_LAUNCHED}{self._launcher}", msgspec.json.encode(running))

    def _outlives(self, end: RankEnded) -> bool:
        """Whether the others go on after this end, of which they learn."""
        try:
            self._publish_running()
            if end.exit_code == 0:  # nothing is left to do
                rank_values.set_value(self._values, _OVER, b"1")
            if end.rank == 0 and end.exit_code == 0:  # one that waits for the others may go
                before, _ = rank_values.change_members(self._values, Members.ended)
                for rank in self._ranks.keys() - set(before.ranks):
                    self._ranks[rank].kill()
            if rank_values.get_value(self._values, _OVER):
                return True
            before, after = rank_values.change_members(self._values, partial(self._after, end))
        except rank_values.ValuesGone:
            return False
        if after.ranks and end.rank in before.ranks and self._joined < _MOST_JOIN:
            self._joined += 1
            # Where no process or memory is left for another one, the others go on as they are.
            with suppress(OSError, rank_values.ValuesGone):
                self._run(self.next_rank(), self._locals[end.rank])
        return bool(after.ranks)

    def _after(self, end: RankEnded, members: Members) -> Members:
        is_outlived = end.rank and end.exit_code == -signal.SIGKILL and self._can_go_on()
        return members.without([end.rank]) if is_outlived or end.rank not in members.ranks else members.ended()

    def _can_go_on(self) -> bool:
        return rank_values.get_value(self._values, GO_ON) is not None

    def _watch_others(self) -> None:
        """Kill ranks that hang, if the first launcher was told to; of other machines, notice that they are gone."""
        while not self._gone.empty():
            self._lose_machine(self._gone.get())
        if self.is_hung.is_set():
            self.is_hung.clear()
            if self._can_go_on() and not self._hangs(0):
                self._asked = time.monotonic() + _HUNG_SECONDS, rank_values.read_members(self._values)
                self._values.ask(rank_values.Request(operation="add", key=_HUNG, number=1))
            else:
                self._report(RanksOutlived(ranks=()))
        asked = int(rank_values.get_value(self._values, _HUNG) or b"0")
        if asked > self._answered:
            self._answered, members = asked, rank_values.read_members(self._values)
            for rank in self._ranks.keys() & set(members.ranks):
                if self._hangs(rank):
                    self._ranks[rank].kill()
        late = msgspec.json.decode(rank_values.get_value(self._values, LATE) or b"[]", type=list[int])
        for rank in self._ranks.keys() & set(late):
            self._ranks[rank].kill()
        if self._asked is not None:
            until, before = self._asked
            lost = set(before.ranks) - set(rank_values.read_members(self._values).ranks)
            if lost or time.monotonic() > until:
                self._asked = None
                self._report(RanksOutlived(ranks=tuple(sorted(lost))))

    def _hangs(self, rank: int) -> bool:
        """Whether a rank of this machine is in no exchange with the others, or is stopped."""
        with suppress(psutil.Error):
            is_stopped = psutil.Process(self._ranks[rank].pid).status() == psutil.STATUS_STOPPED
            return is_stopped or not self._marks.has(rank)
        return False

    def _lose_machine(self, name: str) -> None:
        launcher = name.removeprefix(LAUNCHER)
        if launcher == name or rank_values.get_value(self._values, _OVER) or not self._can_go_on():
            return
        running = rank_values.get_value(self._values, f"{_LAUNCHED}{launcher}")
        ranks = msgspec.json.decode(running or b"[]", type=list[int])
        _, after = rank_values.change_members(self._values, lambda members: members.without(ranks))
        if after.ranks:  # its own may all have been lost just before
            self._report(RanksOutlived(ranks=tuple(ranks), machine=int(launcher)))


def find_failed_rank(ends: Sequence[RankEnded]) -> RankEnded | None:
    """Return the end that is the cause, of those that no one here brought about: not one that only lost a peer."""
    failed = [end for end in ends if end.exit_code]
    own = [end for end in failed if end.exit_code != PEER_LOST_EXIT_CODE]
    return next(iter(own or failed), None)
