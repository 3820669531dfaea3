"""Writes a first configuration for a text, of a size that trains in some five minutes on this machine."""

import json
import re
from dataclasses import dataclass
from glob import escape
from importlib import resources
from pathlib import Path

from cairn.model.configuration.data import DataConfig
from cairn.tasks.data.source_files import find_files
from cairn.tasks.data.text_format import TextFormat, format_of_name, suffixes_of
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.text.format import format_count, format_duration, format_quantity

_SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "global_batch": 16}
_MIDDLE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "global_batch": 32}
_ON_GPU = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "global_batch": 64}
_CORE_TOKENS_PER_SECOND, _GPU_TOKENS_PER_SECOND, _MOST_CORES = 5_000, 200_000, 8
"""A core trains so many of the middle size, a GPU of the largest, as measured or less; more cores find no batch."""
_SECONDS, _MOST_PASSES, _FEWEST_STEPS, _FEWEST_BYTES, _SMALL_BYTES = 240, 20, 100, 1_000, 100_000
_TOKENIZERS = ((2 * _SMALL_BYTES, "bytes", 1.0), (50_000_000, "bpe:1024", 2.4), (1 << 62, "bpe:8192", 3.6))
"""Texts of fewer bytes than the first number get this tokenizer, of about so many bytes a token."""
_PACKED = 3  # times its size a compressed text is taken for


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstConfiguration:
    """A configuration that was written, its text and steps, and an estimate of its training time."""

    path: str
    sources: tuple[str, ...]
    text_bytes: int
    steps: int
    seconds: float


def write_first_configuration(text: Path, *, cores: int, on_gpu: bool) -> FirstConfiguration:
    """Write the file beside the text, or into this folder; raises `InvalidConfiguration`, also if there is one."""
    folder, sources = _choose_sources(text)
    found = find_files(DataConfig(sources=sources), dict.fromkeys(sources, ""), folder)
    text_bytes = sum(one.bytes * (_PACKED if suffixes_of(one.name)[1] else 1) for one in found)
    if text_bytes < _FEWEST_BYTES:
        raise InvalidConfiguration(f"{text}: {text_bytes} bytes of text; rule: at least {_FEWEST_BYTES:,}")
    tokenizer, token_bytes = next((name, each) for most, name, each in _TOKENIZERS if text_bytes < most)
    size = _ON_GPU if on_gpu else _SMALL if text_bytes < _SMALL_BYTES else _MIDDLE
    speed = _GPU_TOKENS_PER_SECOND if on_gpu else _CORE_TOKENS_PER_SECOND * min(cores, _MOST_CORES)
    tokens, per_step = text_bytes / token_bytes, size["global_batch"] * size["block_size"]
    steps = max(_FEWEST_STEPS, 50 * round(min(_SECONDS * speed, _MOST_PASSES * tokens) / per_step / 50))
    seconds = steps * per_step / speed
    path = folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', text.resolve().name.partition('.')[0]).strip('-') or 'run'}.toml"
    template = resources.files("cairn.operations") / "templates" / "first_configuration.toml"
    filled = template.read_text(encoding="utf-8").format(
        text=format_quantity(text_bytes),
        machine="a GPU" if on_gpu else format_count(cores, "CPU core"),
        minutes=format_duration(seconds),
        file=path.name,
        sources=json.dumps(sources, ensure_ascii=False),
        tokenizer=tokenizer,
        steps=steps,
        passes=format_count(max(1, round(steps * per_step / tokens)), "pass", "passes"),
        **size,
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(filled)
    except OSError as error:
        rule = "nothing is overwritten. Rename what is there, or train it"
        raise InvalidConfiguration(f"{path}: cannot be made: {error.strerror}; rule: {rule}") from error
    return FirstConfiguration(path=str(path), sources=sources, text_bytes=text_bytes, steps=steps, seconds=seconds)


def _choose_sources(text: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of the configuration and the text from there: a file, or globs of a folder's kinds of text."""
    if text.is_file():
        return text.parent, (escape(text.name),)
    if not text.is_dir():
        raise InvalidConfiguration(f"{text}: no such file or folder; name a text, or a folder with texts")
    names = [path.name for path in text.rglob("*") if path.is_file() and "/." not in f"/{path.relative_to(text)}"]
    forms = {name[len(name) - len("".join(suffixes_of(name))) :]: format_of_name(name) for name in names}
    known = sorted(ending for ending, form in forms.items() if form)
    if not known:
        rule = "a .txt, .md, .jsonl, .parquet or .csv is in it, also as .gz or .zst"
        raise InvalidConfiguration(f"{text}: no text in it; rule: {rule}")
    folder, place = (text, "") if text.resolve() == Path.cwd() else (text.parent, f"{escape(text.name)}/")
    chosen = [ending for ending in known if forms[ending] == TextFormat.TEXT] or known
    return folder, tuple(f"{place}**/*{ending}" for ending in chosen)
