"""`cairn sample`: one text or several, and following a run; wrong options are refused in `command_lines`."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cairn.operations.trained_models import RunSampler, SampleRequest, follow_checkpoints, read_prompt, show_text
from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.errors import IntegrityError, StoreRefused, StoreUnavailable
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.trainer.initial_weights import WeightsSource, keep_source
from tests.commands import ROOT, Cairn, chosen_folders
from tests.processes.fork_server import fork_server
from tests.writing_run import RUN, WritingRun, open_writing_run


@pytest.fixture
def bard(store: LocalStore, tmp_path: Path) -> WritingRun:
    """A run that has been started, without a checkpoint."""
    run = open_writing_run(store, tmp_path)
    run.start()
    return run


@pytest.fixture
def sample(cairn: Cairn) -> Callable[..., str]:
    """`cairn sample` in this process; returns what it prints on stdout."""

    def run(*arguments: str) -> str:
        ended = cairn("sample", *arguments)
        assert ended.code == 0, ended.err
        return ended.out

    return run


def test_a_text_begins_with_its_prompt_and_ends_with_a_newline(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10)
    text = sample(RUN, "--prompt", "To be", "--tokens", "30")
    assert text.startswith("To be") and text.endswith("\n") and len(text) > len("To be\n")


def test_what_is_streamed_is_what_the_document_holds(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10)
    arguments = (RUN, "--prompt", "To be", "--tokens", "90", "--seed", "3", "--top-p", "0.9", "--ignore-end-of-text")
    document = json.loads(sample(*arguments, "--json"))
    assert sample(*arguments) == f"To be{document['text']}\n" and document["tokens"] == 90


def test_the_document_names_the_weights_the_seed_and_what_ended_the_text(
    bard: WritingRun, sample: Callable[..., str]
) -> None:
    reference = bard.commit(10)
    document = json.loads(sample(f"{RUN}@10", "--tokens", "3", "--seed", "5", "--ignore-end-of-text", "--json"))
    del document["text"]
    assert document == {
        "run_id": RUN,
        "step": 10,
        "manifest_sha256": reference.manifest_sha256,
        "prompt": "",
        "seed": 5,
        "tokens": 3,
        "ended": "length",
    }


def test_several_texts_are_those_of_the_seeds_one_by_one(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10)
    together = json.loads(sample(RUN, "--tokens", "20", "--count", "3", "--seed", "7", "--json"))
    alone = [json.loads(sample(RUN, "--tokens", "20", "--seed", str(seed), "--json")) for seed in (7, 8, 9)]
    assert together == alone


def test_count_makes_the_document_a_list_even_of_one(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10)
    assert len(json.loads(sample(RUN, "--tokens", "2", "--count", "1", "--json"))) == 1


def test_several_texts_stand_under_headings(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10)
    text = sample(RUN, "--tokens", "0", "--count", "2", "--prompt", "x")
    assert text == "sample 1 of 2 · seed 0\nx\n\nsample 2 of 2 · seed 1\nx\n"


def test_a_text_stops_before_the_end_of_text_and_says_so(bard: WritingRun, sample: Callable[..., str]) -> None:
    bard.commit(10, scale=0.0)  # every token is as likely: one in 257 ends the text
    arguments = (RUN, "--tokens", "200", "--top-k", "0", "--temperature", "1", "--seed", "2", "--json")
    ended = json.loads(sample(*arguments))
    longer = json.loads(sample(*arguments, "--ignore-end-of-text"))
    assert ended["ended"] == "end-of-text" and ended["tokens"] < 200
    assert longer["text"].startswith(ended["text"] + "<|endoftext|>") and longer["tokens"] == 200


@pytest.mark.parametrize(("prompt", "text", "tokens"), [("", "ab", 2), ("To be", "", 0)])
def test_a_new_text_is_not_over_before_it_has_begun_and_a_prompt_may_be_the_whole_text(
    bard: WritingRun, monkeypatch: pytest.MonkeyPatch, prompt: str, text: str, tokens: int
) -> None:
    drawn = [bard.manifest.end_of_text_id, *b"ab", bard.manifest.end_of_text_id, *b"c"]
    monkeypatch.setattr("cairn.model.inference.prediction.generate_stream", lambda *arguments, **settings: iter(drawn))
    sampler = RunSampler(bard.log, SampleRequest(prompt=prompt))
    sampler.load(bard.commit(10))
    written = sampler.write(0, lambda piece: None)
    assert (written.text, written.tokens, written.ended) == (text, tokens, "end-of-text")


@pytest.mark.parametrize(("stop", "text", "ended"), [(True, "ab", "end-of-text"), (False, "abzc", "length")])
def test_a_text_stops_at_each_end_that_its_weights_came_with(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool, text: str, ended: str
) -> None:
    documents = {"generation_config.json": json.dumps({"eos_token_id": [256, ord("z")]})}
    source = WeightsSource(name="theirs", licence="", files={"tokenizer.json": "5" * 64}, documents=documents)
    run = open_writing_run(store, tmp_path, initial_source_sha256=keep_source(store, source))
    run.start()
    monkeypatch.setattr("cairn.model.inference.prediction.generate_stream", lambda *given, **named: iter(b"abzc"))
    sampler = RunSampler(run.log, SampleRequest(prompt="To be", stop_at_end=stop))
    sampler.load(run.commit(10))
    written = sampler.write(0, lambda piece: None)
    assert (written.text, written.ended) == (text, ended)


def test_weights_that_were_changed_write_nothing(bard: WritingRun, cairn: Cairn, tmp_path: Path) -> None:
    reference = bard.commit(10)
    shard = tmp_path / "store" / reference.prefix / "weights-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert cairn("sample", RUN).code == 5


def test_a_prompt_comes_from_the_command_line_from_stdin_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"von hier\n")
    file, stdin = str(tmp_path / "prompt.txt"), io.BytesIO("aus der Röhre\n\n".encode())
    found = [read_prompt("so", "", stdin), read_prompt("-", "", stdin), read_prompt("", file, stdin)]
    assert found == ["so", "aus der Röhre\n", "von hier"]


def test_a_hyphen_as_prompt_is_stdin_and_a_prompt_may_begin_with_one(
    bard: WritingRun, sample: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bard.commit(10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"To be\n")))
    assert sample(RUN, "--prompt", "-", "--tokens", "0") == "To be\n"
    assert sample(RUN, "--prompt", "- or not", "--tokens", "0") == "- or not\n"


@pytest.mark.parametrize(
    ("prompt", "file", "words"),
    [("a", "b", "only one of them"), ("", "missing.txt", "missing.txt"), ("-", "", "UTF-8")],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: str, file: str, words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        read_prompt(prompt, file, io.BytesIO(b"\xff"))


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="UTF-8"):
        SampleRequest(prompt="\udcff")


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_control_characters_and_never_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", _Screen())
    show_text("a\x1b[2J\tb\n\x9b")
    assert sys.stdout.getvalue() == "a␛[2J\tb\n\N{REPLACEMENT CHARACTER}"  # type: ignore[attr-defined]


def test_a_pipe_is_given_every_character_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_text("a\x1b[2J")
    assert capsys.readouterr().out == "a\x1b[2J"


def test_one_network_serves_every_checkpoint_of_its_run(bard: WritingRun) -> None:
    sampler = RunSampler(bard.log, SampleRequest(tokens=20, stop_at_end=False))
    references = [bard.commit(10, seed=1, scale=9.0), bard.commit(20, seed=2, scale=9.0)]
    both = []
    for reference in references:
        sampler.load(reference)
        both.append(sampler.write(0, lambda piece: None))
    alone = RunSampler(bard.log, SampleRequest(tokens=20, stop_at_end=False))
    alone.load(references[1])
    assert both[1] == alone.write(0, lambda piece: None) and both[0].text != both[1].text


def test_text_is_drawn_with_the_threads_of_the_run_whatever_the_process_has(bard: WritingRun) -> None:
    sampler, before = RunSampler(bard.log, SampleRequest(tokens=3, stop_at_end=False)), torch.get_num_threads()
    sampler.load(bard.commit(10, seed=1))
    seen, threads = set[int](), configuration_of(bard.log.state).training.threads
    torch.set_num_threads(threads + 1)
    try:
        sampler.write(0, lambda piece: seen.add(torch.get_num_threads()))
        assert seen == {threads, threads + 1} and torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(before)


@dataclass
class Follower:
    """A follower whose pauses are moments for the test to do what the world does meanwhile."""

    run: WritingRun
    used: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def follow(
        self, *happenings: Callable[[], object], use: Callable[[CheckpointReference], None] | None = None
    ) -> None:
        """Follow the run; each pause lets the next thing happen."""
        waiting = iter(happenings)

        def sleep(seconds: float) -> None:
            self.pauses.append(seconds)
            next(waiting)()

        log = RunLog(self.run.log.store, RUN)
        step = use or (lambda reference: self.used.append(reference.step))
        follow_checkpoints(log, step, every_seconds=2.0, say=self.said.append, sleep=sleep)


@pytest.fixture
def follower(bard: WritingRun) -> Follower:
    """A follower of the run."""
    return Follower(bard)


def raising(*errors: Exception | None) -> Callable[[CheckpointReference], None]:
    """Return a use of checkpoints that raises these errors one after the other."""
    waiting = iter(errors)

    def use(reference: CheckpointReference) -> None:
        if (error := next(waiting)) is not None:
            raise error

    return use


def test_following_starts_with_the_newest_checkpoint_and_takes_each_new_one(follower: Follower) -> None:
    run = follower.run
    run.commit(10)
    run.commit(20)

    def two_more() -> None:
        run.commit(30)
        run.commit(40)

    follower.follow(two_more, lambda: run.finish(run.commit(41)))
    assert follower.used == [20, 30, 40, 41] and follower.pauses == [2.0, 2.0]


def test_following_a_run_without_a_checkpoint_waits_for_the_first(follower: Follower) -> None:
    follower.follow(lambda: None, lambda: follower.run.finish(follower.run.commit(10)))
    assert follower.used == [10] and follower.said == ["no checkpoint is committed yet; waiting for the first"]


def test_following_a_finished_run_takes_its_last_checkpoint_and_ends(follower: Follower) -> None:
    follower.run.finish(follower.run.commit(10))
    follower.follow()
    assert follower.used == [10]


def test_following_goes_on_over_the_end_of_an_attempt_and_says_it_once(follower: Follower) -> None:
    run = follower.run
    run.commit(10)

    def goes_on() -> None:
        run.start()
        run.finish(run.commit(20))

    follower.follow(lambda: run.end("preempted"), lambda: None, goes_on)
    assert follower.used == [10, 20]
    assert follower.said == ["attempt 1 ended: preempted; waiting for the run to go on"]


def test_a_checkpoint_superseded_before_its_turn_is_passed_over_with_a_line(follower: Follower) -> None:
    run = follower.run
    run.commit(10)

    def superseded() -> None:
        early = run.commit(20)
        last = run.commit(30)
        run.supersede(early)
        run.finish(last)

    follower.follow(superseded)
    assert follower.used == [10, 30]
    assert follower.said == ["step 20 · attempt 1 is passed over: it is superseded by now"]


def test_a_checkpoint_that_goes_while_it_is_loaded_is_passed_over_with_a_line(follower: Follower) -> None:
    run, done = follower.run, []
    first = run.commit(10)

    def use(reference: CheckpointReference) -> None:
        if reference.step == 10:
            last = run.commit(20)
            run.supersede(first)
            run.finish(last)
            raise IntegrityError("manifest.json: missing")
        done.append(reference.step)

    follower.follow(use=use)
    assert done == [20] and follower.said == ["step 10 · attempt 1 is passed over: it is superseded by now"]


def test_a_damaged_checkpoint_is_passed_over_with_what_is_wrong_with_it(follower: Follower) -> None:
    follower.run.finish(follower.run.commit(10))
    follower.follow(use=raising(IntegrityError("a flipped byte")))
    assert follower.said == ["step 10 · attempt 1 is passed over: a flipped byte"]


def test_a_store_that_is_away_is_asked_again_for_the_same_checkpoint(follower: Follower) -> None:
    follower.run.finish(follower.run.commit(10))
    away = StoreUnavailable("no route")
    follower.follow(lambda: None, lambda: None, use=raising(away, away, None))
    assert follower.said == ["the store is away, asking again every 2 s: no route"]


def test_a_store_that_refuses_ends_the_following(follower: Follower) -> None:
    follower.run.commit(10)
    with pytest.raises(StoreRefused):
        follower.follow(use=raising(StoreRefused("no permission")))


Started = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Start the real `cairn sample`, forked with its imports done if wished; what is alive at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, forked: bool = True) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **chosen_folders(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "cairn.cli.command", "sample", *arguments]
        popen = fork_server().popen if forked else subprocess.Popen
        process = popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_text_comes_while_it_is_drawn_and_ctrl_c_ends_it_with_130(bard: WritingRun, started: Started) -> None:
    bard.commit(10)
    process = started(RUN, "--prompt", "To be", "--tokens", "100000000", "--ignore-end-of-text")
    assert len(process.stdout.read(200)) == 200  # long before the last token
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors.decode()) == (130, "interrupted\n")


def test_a_reader_who_has_seen_enough_ends_it_quietly(bard: WritingRun, started: Started) -> None:
    bard.commit(10)
    process = started(RUN, "--tokens", "100000000", "--ignore-end-of-text")
    process.stdout.read(50)
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(timeout=240), errors) == (0, b"")


def test_the_command_follows_a_run_to_its_end(bard: WritingRun, started: Started) -> None:
    bard.commit(10)
    process = started(RUN, "--follow", "--every", "0.05", "--tokens", "0", "--prompt", "To be")
    heard = [process.stdout.readline() for _ in range(3)]
    bard.end("preempted")
    bard.start()
    bard.finish(bard.commit(20))
    out, _ = process.communicate(timeout=240)
    assert (b"".join(heard) + out).decode() == "step 10 · attempt 1\nTo be\n\nstep 20 · attempt 2\nTo be\n\n"
    assert process.returncode == 0
