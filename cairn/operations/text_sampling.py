"""Draws text from the committed checkpoints of a run, and prints it as it is drawn.

One network is built for a run; each checkpoint's weights are loaded into it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cairn.operations.sample_request import SampleRequest
from reports.queries.run_lookup import FoundCheckpoint, configuration_of
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_log import RunLog
from tasks.errors import TaskError
from tasks.machine.work_folder import work_folder
from tasks.policy.termination import ExitCode
from tasks.text.output import say

if TYPE_CHECKING:
    from tasks.evaluator.checkpoint_model import CheckpointModel

END_OF_TEXT, LENGTH = "end-of-text", "length"
_KEPT = "\n\t"
_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in _KEPT},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
}
"""Symbols that a terminal gets for control characters, which a byte-level network may draw."""


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

    def __init__(self, log: RunLog, request: SampleRequest) -> None:
        """Prepare for a run whose log was read; nothing is loaded yet."""
        self._log, self._request = log, request
        self._opened: CheckpointModel | None = None
        self._reference: CheckpointReference | None = None

    def load(self, reference: CheckpointReference) -> None:
        """Load the verified weights of a checkpoint; keeps the present ones if it raises `IntegrityError`."""
        self._opened = self._open(reference) if self._opened is None else self._reload(self._opened, reference)
        self._reference = reference

    def write(self, seed: int, show: Callable[[str], None]) -> Sample:
        """Continue the prompt; calls `show` with the prompt, then with each piece of text as it is drawn."""
        from model.inference.generation import TextStream

        opened, reference, request = self._opened, self._reference, self._request
        if opened is None or reference is None:
            raise TaskError("no weights are loaded; load a checkpoint first")
        show(request.prompt)
        prompt = opened.tokenizer.encode_prompt(request.prompt)
        stream = TextStream(opened.tokenizer.decode, prompt if request.prompt else ())
        pieces: list[str] = []
        ended = LENGTH
        for token in self._draw(opened, prompt, seed):
            if request.stop_at_end and token == opened.snapshot.manifest.end_of_text_id:
                if not (pieces or request.prompt):
                    continue  # a weak network often repeats the token it begins with; an empty text is of no use
                ended = END_OF_TEXT
                break
            pieces.append(stream.push(token))
            show(pieces[-1])
        tokens = len(pieces)
        pieces.append(stream.finish())
        show(pieces[-1])
        return Sample(
            run_id=self._log.run_id,
            step=reference.step,
            manifest_sha256=reference.manifest_sha256,
            prompt=request.prompt,
            text="".join(pieces),
            seed=seed,
            tokens=tokens,
            ended=ended,
        )

    def _draw(self, opened: "CheckpointModel", prompt: list[int], seed: int) -> Iterator[int]:
        from model.inference.generation import Sampling, generate_stream

        request = self._request
        sampling = Sampling(temperature=request.temperature, top_k=request.top_k or None, top_p=request.top_p)
        return generate_stream(opened.network, prompt, new_tokens=request.tokens, sampling=sampling, seed=seed)

    def _open(self, reference: CheckpointReference) -> "CheckpointModel":
        from model.configuration.network import ModelConfig
        from model.training.determinism import resolve_device
        from tasks.evaluator.checkpoint_model import open_model

        state = self._log.state
        assert state.opened is not None
        return open_model(
            self._log.store,
            reference,
            model=ModelConfig.model_validate(state.opened.config["model"]),
            snapshot_id=state.opened.data_snapshot,
            cache_dir=work_folder(os.environ) / "snapshots",
            device=resolve_device(self._request.device),
            mask_documents=configuration_of(state).training.mask_documents,
        )

    def _reload(self, opened: "CheckpointModel", reference: CheckpointReference) -> "CheckpointModel":
        from model.training.train_state import load_weights
        from storage.checkpoints.checkpoint import load_checkpoint
        from tasks.trainer.tensor_exchange import to_tensors

        load_weights(opened.network, to_tensors(load_checkpoint(self._log.store, reference, group="weights").tensors))
        return opened


def show_text(piece: str) -> None:
    """Print a piece of text at once, no newline after it."""
    sys.stdout.write(piece.translate(_PICTURES) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def show_nothing(piece: str) -> None:
    """Print nothing: the text will be in a JSON document."""


def write_checkpoint(
    found: FoundCheckpoint, request: SampleRequest, *, show: Callable[[str], None]
) -> tuple[Sample, ...]:
    """Draw `request.count` texts from a committed checkpoint; raises `IntegrityError` if it does not verify."""
    sampler = RunSampler(found.log, request)
    sampler.load(found.reference)
    return write_samples(sampler, request, show=show)


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


def end_interrupted() -> ExitCode:
    """End the line that Ctrl-C cut, and return the exit code."""
    if sys.stdout.isatty():
        show_text("\n")
    say("interrupted")
    return ExitCode.INTERRUPTED


def checkpoint_heading(reference: CheckpointReference) -> str:
    """Return the heading of one checkpoint's text."""
    return f"step {reference.step} · attempt {reference.attempt}"
