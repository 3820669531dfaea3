"""How text is drawn: the options of `cairn sample`, validated before anything is loaded; imported by every command."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from cyclopts import Parameter

from tasks.errors import InvalidConfiguration

STDIN = "-"


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
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    count: int | None = None
    stop_at_end: Annotated[bool, Parameter(negative="--ignore-end-of-text")] = True
    device: Literal["cpu", "cuda", "auto"] = "cpu"

    def __post_init__(self) -> None:
        """Refuse values that cannot be drawn with."""
        rules = (
            ("--tokens", self.tokens, self.tokens >= 0, "must not be negative"),
            ("--temperature", self.temperature, 0 <= self.temperature < math.inf, "must not be negative"),
            ("--top-k", self.top_k, self.top_k >= 0, "must not be negative; 0 leaves every token in"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "must be above 0 and at most 1, which leaves every token in"),
            ("--seed", self.seed, 0 <= self.seed < 2**63, "must be at least 0 and below 2**63"),
            ("--count", self.count, self.count is None or self.count >= 1, "must be at least 1"),
        )
        for option, value, holds, rule in rules:
            if not holds:
                raise InvalidConfiguration(f"{option} {value}: {rule}")
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise InvalidConfiguration("--prompt: is not UTF-8")


def read_prompt(prompt: str, prompt_file: str, stdin: BinaryIO) -> str:
    """Return the prompt: as typed, all of `stdin` for "-", or a file's text, without one newline at its end."""
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
