"""Uses a run's committed checkpoints, which it does not pin: prints text as it is drawn, exports with a model card."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from cyclopts import Parameter, validators

from cairn.model.errors import InvalidInput, ModelError
from cairn.reports.queries import alias_history, run_lookup
from cairn.reports.text import display_tables
from cairn.storage.errors import IntegrityError, ObjectMissing, StoreRefused, StoreUnavailable, restated
from cairn.storage.logs import log_entry, run_log, run_state
from cairn.storage.stores import codec, object_store, regular_file
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.text.format import format_value, one_line
from cairn.tasks.text.output import say

if TYPE_CHECKING:
    from cairn.tasks.evaluator.checkpoint_model import CheckpointModel
    from cairn.tasks.trainer.initial_weights import WeightsSource

_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
}
"""Symbols that a terminal gets for control characters, which a byte-level network may draw."""
Use = Callable[[log_entry.CheckpointReference], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """How text is drawn; text number n of `count` is drawn with `seed` + n - 1, so each can be drawn again alone.

    Args:
        prompt: what the text begins with, - for stdin; without one a new text begins.
        prompt_file: path of what the text begins with.
        tokens: at most this many tokens follow.
        temperature: 0 takes the likeliest token each time.
        top_k: draw from this many likeliest tokens; 0 leaves all in.
        top_p: draw from the fewest likeliest tokens that have this chance together; 1 leaves all in.
        seed: equal seeds give equal text on one device.
        count: so many texts, drawn with --seed, --seed + 1, …; with --json a list of them.
        stop_at_end: stop where the text ends, or write on behind the end-of-text token.
        device: where it is computed; auto takes a GPU where there is one.
    """

    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    prompt_file: str = ""
    tokens: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 200
    temperature: Annotated[float, Parameter(validator=validators.Number(gte=0, lt=math.inf))] = 0.8
    top_k: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 50
    top_p: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 1.0
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0, lt=2**63))] = 0
    count: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None
    stop_at_end: Annotated[bool, Parameter(negative="--ignore-end-of-text")] = True
    device: Literal["cpu", "cuda", "mps", "auto"] = "cpu"

    def __post_init__(self) -> None:
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise InvalidConfiguration("--prompt: is not UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text of exact weights; `ended` is end-of-text or length."""

    run_id: str
    step: int
    manifest_sha256: str
    prompt: str
    text: str
    seed: int
    tokens: int
    ended: str


class RunSampler:
    """The network of one run: `load` a checkpoint into it, then `write` text."""

    def __init__(self, log: run_log.RunLog, request: SampleRequest) -> None:
        self._log, self._request = log, request
        self._opened: CheckpointModel | None = None
        self._reference: log_entry.CheckpointReference | None = None
        self._ends = frozenset[int]()

    def load(self, reference: log_entry.CheckpointReference) -> None:
        """Load the verified weights of a checkpoint; keeps the present ones if it raises `IntegrityError`."""
        from cairn.tasks.evaluator.checkpoint_model import load_network
        from cairn.tasks.trainer.initial_weights import read_source

        if self._opened is None:
            self._opened = open_run_model(self._log, reference, self._request.device)
            opened = self._log.state.opened
            begun = opened.initial_source_sha256 if opened else None
            further = read_source(self._log.store, begun).end_ids if begun else frozenset[int]()
            self._ends = further | {self._opened.snapshot.manifest.end_of_text_id}
        else:
            load_network(self._opened.network, self._log.store, reference)
        self._reference = reference

    def write(self, seed: int, show: Callable[[str], None]) -> Sample:
        """Continue the prompt; calls `show` with the prompt, then with each piece of text as it is drawn."""
        from cairn.model.estimates.utilization import using_threads
        from cairn.model.inference.prediction import Sampling, TextStream, generate_stream

        opened, reference, request = self._opened, self._reference, self._request
        assert opened is not None and reference is not None
        show(request.prompt)
        prompt = opened.prompt_ids(request.prompt)
        stream = TextStream(opened.tokenizer.decode, prompt if request.prompt else ())
        pieces, ended = list[str](), "length"
        sampling = Sampling(temperature=request.temperature, top_k=request.top_k or None, top_p=request.top_p)
        tokens = generate_stream(opened.network, prompt, new_tokens=request.tokens, sampling=sampling, seed=seed)
        with using_threads(run_lookup.configuration_of(self._log.state).training.threads):
            for token in tokens:
                if request.stop_at_end and token in self._ends:
                    if not (pieces or request.prompt):
                        continue  # a weak network often repeats the token it begins with; an empty text is of no use
                    ended = "end-of-text"
                    break
                pieces.append(stream.push(token))
                show(pieces[-1])
        pieces.append(stream.finish())
        show(pieces[-1])
        return Sample(
            run_id=self._log.run_id,
            step=reference.step,
            manifest_sha256=reference.manifest_sha256,
            prompt=request.prompt,
            text="".join(pieces),
            seed=seed,
            tokens=len(pieces) - 1,  # the last piece ends the one before
            ended=ended,
        )


def open_run_model(
    log: run_log.RunLog, reference: log_entry.CheckpointReference, device: str = "cpu"
) -> "CheckpointModel":
    """Return the run's network with the verified weights of a checkpoint, as `open_model` does."""
    from cairn.model.training.determinism import resolve_device
    from cairn.tasks.configuration.configuration_source import allowed_code
    from cairn.tasks.evaluator.checkpoint_model import open_model

    config, opened = run_lookup.configuration_of(log.state), log.state.opened
    assert opened is not None
    return open_model(
        log.store,
        reference,
        model=config.model,
        snapshot_id=opened.data_snapshot,
        cache_dir=work_folder(os.environ) / "snapshots",
        device=resolve_device(device),
        mask_documents=config.training.mask_documents,
        allowed_code=allowed_code(os.environ),
    )


def read_prompt(prompt: str, prompt_file: str, stdin: BinaryIO) -> str:
    """Return the prompt: as typed, all of `stdin` for "-", or a file's text, without one newline at its end."""
    if prompt and prompt_file:
        raise InvalidConfiguration("--prompt and --prompt-file: only one of them says what the text begins with")
    if not prompt_file and prompt != "-":
        return prompt
    where = f"--prompt-file {prompt_file}" if prompt_file else "--prompt -"
    with restated((OSError, UnicodeDecodeError), InvalidConfiguration, f"{where}: cannot be read as UTF-8 text"):
        text = (regular_file.read_file(prompt_file) if prompt_file else stdin.read()).decode()
    return text.removesuffix("\n").removesuffix("\r")


def show_text(piece: str) -> None:
    """Print a piece of text at once, no newline after it."""
    sys.stdout.write(piece.translate(_PICTURES) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def write_samples(sampler: RunSampler, request: SampleRequest, *, show: Callable[[str], None]) -> tuple[Sample, ...]:
    """Draw `request.count` texts from the loaded weights, with a heading each if there are several."""
    samples, count = [], request.count or 1
    for number in range(count):
        seed = request.seed + number
        if count > 1:
            show("\n" * (number > 0) + f"sample {number + 1} of {count} · seed {seed}\n")
        samples.append(sampler.write(seed, show))
        show("\n")
    return tuple(samples)


def follow_checkpoints(
    log: run_log.RunLog, use: Use, *, every_seconds: float, say: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Call `use` with a run's newest checkpoint and each later one until the run has finished; raises `StoreRefused`.

    A checkpoint is used again if the store was unavailable.
    """
    passed: int | None = None  # how many of the run's checkpoints are behind us
    last_said = ""
    while True:
        line = ""
        try:
            state = log.refresh()
            if passed is None and state.newest_committed is not None:
                passed = state.checkpoints.index(state.newest_committed)
            if passed is not None and passed < len(state.checkpoints):
                record = state.checkpoints[passed]
                if problem := _use(log, record, use):
                    say(f"step {record.committed.step} · attempt {record.committed.attempt} is passed over: {problem}")
                passed, last_said = passed + 1, ""
                continue
            if state.finished is not None:
                return
            if state.attempts and (ended := state.attempts[-1].ended) is not None:
                line = f"attempt {ended.attempt} ended: {ended.reason}; waiting for the run to go on"
            elif not state.checkpoints:
                line = "no checkpoint is committed yet; waiting for the first"
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            line = f"the store is away, asking again every {every_seconds:g} s: {error}"
        if line and line != last_said:
            say(line)
        last_said = line
        sleep(every_seconds)


def _use(log: run_log.RunLog, record: run_state.CheckpointRecord, use: Use) -> str:
    """Use a checkpoint, or return why it cannot be used."""
    if not record.is_committed:
        return f"it is {record.state} by now"
    try:
        use(record.committed.reference)
    except InvalidInput:
        raise
    except ModelError as error:
        return str(error)
    except (IntegrityError, ObjectMissing) as error:
        now = log.refresh().find(record.committed.prefix)
        return str(error) if now is None or now.is_committed else f"it is {now.state} by now"
    return ""


def follow_run(
    store: object_store.ObjectStore, run: str, request: SampleRequest, *, every_seconds: float, json: bool
) -> None:
    """Print text of each checkpoint until the run has finished, at low priority; RUN@STEP is `InvalidConfiguration`."""
    if json:
        raise InvalidConfiguration("--follow --json: one document cannot hold texts still to come; leave one out")
    run_id, _, step = run.partition("@")
    if step:
        raise InvalidConfiguration(f"--follow {run}: follows a whole run; leave @{step} out")
    log = run_lookup.find_run(store, run_id)
    sampler = RunSampler(log, request)

    def use(reference: log_entry.CheckpointReference) -> None:
        sampler.load(reference)
        show_text(f"step {reference.step} · attempt {reference.attempt}\n")
        write_samples(sampler, request, show=show_text)
        show_text("\n")

    os.nice(15)  # training on the same machine has priority, as it has over evaluators
    follow_checkpoints(log, use, every_seconds=every_seconds, say=say, sleep=time.sleep)


def write_card(
    found: run_lookup.FoundCheckpoint, opened: "CheckpointModel", source: "WeightsSource | None", is_adapter: bool
) -> str:
    """Return the card, from the records alone: use, provenance, measurements, promotions, limits, configuration."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from cairn.model.configuration.network import family_of
    from cairn.tasks.configuration.stored_configuration import parse_stored_configuration

    loader = PackageLoader("cairn.operations")
    pages = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    pages.filters |= {
        "code": lambda text: "`{}`".format(one_line(text).replace("`", "'").replace("|", "\\|")),  # stays in its cell
        "document": lambda document: codec.encode(document).decode(),
        "json": json.dumps,
        "markdown": display_tables.markdown_text,
        "number": lambda number: f"{number:,}",
        "time": format_value,
    }
    config = parse_stored_configuration(found.opened.config)  # what is not frozen has its default
    promotions = alias_history.list_promotions(found.log.store)
    path, _, entry = (config.model.module or "").rpartition(":")
    given = ", ".join(f"{name}={value!r}" for name, value in getattr(opened.network, "called_with", {}).items())
    return pages.get_template("model_card.md.j2").render(
        found=found,
        made=opened,
        end_of_text=opened.tokenizer.decode([opened.tokenizer.end_of_text_id]),
        promotions=[view for view in promotions if view.manifest_sha256 == found.reference.manifest_sha256],
        config=config,
        family=family_of(config.model),
        entry=(Path(path).stem, entry),
        call=f"{entry}({given})",
        source=source,
        is_adapter=is_adapter,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """The files of an export by name, and their checkpoint."""

    folder: str
    files: Mapping[str, object_store.WrittenObject]
    run_id: str
    checkpoint: log_entry.CheckpointReference


def export_model(found: run_lookup.FoundCheckpoint, folder: Path, *, adapter: bool = False) -> ExportedModel:
    """Verify and write the checkpoint, or its `adapter` alone; raises `InvalidConfiguration`, and `IntegrityError`."""
    from cairn.tasks.evaluator import checkpoint_model
    from cairn.tasks.trainer.initial_weights import read_source

    lora = run_lookup.configuration_of(found.log.state).training.lora
    if adapter and lora is None:
        problem = f"--adapter: run {found.log.run_id} was trained without training.lora"
        raise InvalidConfiguration(f"{problem}; leave it out for the whole model")
    try:
        checkpoint_model.require_empty(folder)  # before the weights are read
        kept = found.opened.initial_source_sha256
        source = read_source(found.log.store, kept) if kept else None
        opened = open_run_model(found.log, found.reference)
        card = write_card(found, opened, source, adapter)
        if adapter and lora is not None:
            trained, _ = checkpoint_model.read_trained(found.log.store, found.reference)
            shape, base = opened.network.config, source.name if source else ""
            checkpoint_model.write_adapter_directory(folder, trained, shape, lora, card=card, base=base)
        else:
            checkpoint_model.write_model_directory(folder, opened, card=card, source=source)
    except (TaskError, InvalidInput) as error:
        raise InvalidConfiguration(str(error)) from error
    files = {path.name: object_store.describe_file(path) for path in sorted(folder.iterdir())}
    return ExportedModel(folder=str(folder), files=files, run_id=found.log.run_id, checkpoint=found.reference)
