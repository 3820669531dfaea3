"""What a committed checkpoint writes: from a request to text, piece by piece.

Owns what may be asked for, what is told of a text, and that one network serves every checkpoint of its run: the
tokenizer, the snapshot and the network are opened once, a checkpoint brings its weights. Imports torch only in the
function that needs it. Refuses to know where text is shown.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from reports.queries.run_lookup import configuration_of
from storage.logs.run_entries import CheckpointReference
from storage.logs.run_log import RunLog
from tasks.errors import InvalidConfiguration, TaskError
from tasks.machine.work_folder import work_folder

if TYPE_CHECKING:
    from tasks.evaluator.checkpoint_model import CheckpointModel

STDIN = "-"
END_OF_TEXT, LENGTH = "end-of-text", "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """How text is drawn; temperature 0 takes the likeliest token, `top_k` 0 and `top_p` 1 leave every token in.

    Text number n of `count` is drawn with `seed` + n - 1, so that each can be had again alone.
    """

    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    count: int = 1
    stop_at_end: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn before anything is loaded."""
        rules = (
            ("--tokens", self.tokens, self.tokens >= 0, "must not be negative"),
            ("--temperature", self.temperature, 0 <= self.temperature < math.inf, "must not be negative"),
            ("--top-k", self.top_k, self.top_k >= 0, "must not be negative; 0 leaves every token in"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "must be above 0 and at most 1, which leaves every token in"),
            ("--seed", self.seed, 0 <= self.seed < 2**63, "must be at least 0 and below 2**63"),
            ("--count", self.count, self.count >= 1, "must be at least 1"),
        )
        for option, value, holds, rule in rules:
            if not holds:
                raise InvalidConfiguration(f"{option} {value}: {rule}")
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise InvalidConfiguration("--prompt: is not UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Text that exact weights wrote: `tokens` of it, and what ended it, end-of-text or length."""

    run_id: str
    step: int
    manifest_sha256: str
    prompt: str
    text: str
    seed: int
    tokens: int
    ended: str


class RunSampler:
    """The network of one run; `load` gives it the weights of a checkpoint, `write` lets them write."""

    def __init__(self, log: RunLog, request: SampleRequest) -> None:
        """Prepare for a run whose log was read; nothing is loaded yet."""
        self._log, self._request = log, request
        self._opened: CheckpointModel | None = None
        self._reference: CheckpointReference | None = None

    def load(self, reference: CheckpointReference) -> None:
        """Take the verified weights of a checkpoint; raises `IntegrityError` and keeps those it had."""
        self._opened = self._first(reference) if self._opened is None else self._next(self._opened, reference)
        self._reference = reference

    def write(self, seed: int, show: Callable[[str], None]) -> Sample:
        """Write on from the prompt; `show` is given the prompt, then each piece of text as it is drawn."""
        from model.inference.text_stream import TextStream

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
                    continue  # a weak network likes to repeat what it begins with; an empty text is nobody's wish
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
        from model.inference.generation import Drawing, generate_stream

        request = self._request
        drawing = Drawing(temperature=request.temperature, top_k=request.top_k or None, top_p=request.top_p)
        return generate_stream(opened.network, prompt, new_tokens=request.tokens, drawing=drawing, seed=seed)

    def _first(self, reference: CheckpointReference) -> "CheckpointModel":
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

    def _next(self, opened: "CheckpointModel", reference: CheckpointReference) -> "CheckpointModel":
        from model.training.weights import load_weights
        from storage.checkpoints.checkpoint import load_checkpoint
        from tasks.trainer.tensor_exchange import to_tensors

        load_weights(opened.network, to_tensors(load_checkpoint(self._log.store, reference, group="weights").tensors))
        return opened


def read_prompt(prompt: str, prompt_file: str, stdin: BinaryIO) -> str:
    """Return the prompt meant: as typed, all of `stdin` for "-", or a file's text, without one newline at its end."""
    if prompt and prompt_file:
        raise InvalidConfiguration("--prompt and --prompt-file: only one of them says what the text begins with")
    if not prompt_file and prompt != STDIN:
        return prompt
    where = f"--prompt-file {prompt_file}" if prompt_file else "--prompt -"
    try:
        text = (Path(prompt_file).read_bytes() if prompt_file else stdin.read()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"{where}: cannot be read as UTF-8 text: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")
