"""Reads a tokenizer of unknown origin and the chat template beside it, and copies such files from a URL.

A tokenizer.json is loaded in a child process with bounded memory and time first, then in this one.
"""

import atexit
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer, tokenizer_file
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError, restated
from cairn.storage.stores import child_process, codec, redaction, regular_file
from cairn.tasks.configuration.addresses import READABLE, expand_home, why_unreadable, wrong_scheme
from cairn.tasks.data import chat_template, document

_MOST_COPY_BYTES, _MOST_DOCUMENT_BYTES = 64 << 20, 2 << 20
_CONFIG, _TOKENS, _TEMPLATE = BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Documents beside a tokenizer.json."""
_LOADER, _CORE_SECONDS = "cairn.model.data.tokenizer_file", 120
_REMEDY = "Take another tokenizer, or bytes, or bpe:<size>"
_tried: set[str] = set()


def load_library_tokenizer(text: str) -> LibraryTokenizer:
    """Return the tokenizer that `text` is; raises InvalidInput in one line. A child process tries each text once."""
    content = text.encode("utf-8", "surrogatepass")
    digest = codec.sha256(content)
    if digest not in _tried and text != tokenizer.Tokenizer.bytes().json:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            try:
                limits: Any = {"remedy": _REMEDY, "core_seconds": _CORE_SECONDS}
                with child_process.bounded_process(_LOADER, file=file, **limits) as stdout:
                    stdout.read()
            except IntegrityError as error:
                where = "" if "tokenizer.json" in str(error) else "tokenizer.json: "
                raise InvalidInput(f"{where}{error}") from error
        _tried.add(digest)
    return tokenizer_file.load_tokenizer(text)


def read_library_tokenizer(path: Path) -> LibraryTokenizer:
    """Load the tokenizer of a file as `load_library_tokenizer` does; raises OSError and UnicodeDecodeError too."""
    return load_library_tokenizer(regular_file.read_file(path, tokenizer_file.MAX_FILE_BYTES).decode("utf-8-sig"))


def parse_tokenizer(text: str, end_of_text_id: int | None = None) -> tokenizer.Tokenizer:
    """Load a snapshot's tokenizer as `load_library_tokenizer` does, with the end of text that it was made with."""
    return tokenizer.Tokenizer(load_library_tokenizer(text), end_of_text_id=end_of_text_id)


def read_tokenizer(path: Path, *, end_of_text: str = "", end_of_text_id: int | None = None) -> tokenizer.Tokenizer:
    """Return the tokenizer of a file; InvalidInput names the file and the problem."""
    try:
        return tokenizer.Tokenizer(read_library_tokenizer(path), end_of_text=end_of_text, end_of_text_id=end_of_text_id)
    except (OSError, UnicodeDecodeError, InvalidInput) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"tokenizer file {path}: {problem}") from error


def find_template(data: DataConfig, base_dir: Path) -> chat_template.ChatTemplate | None:
    """Return the template beside `data.tokenizer`; None where it is no file or has none. Raises InvalidCorpus."""
    if not data.tokenizer.endswith(".json"):
        return None
    with restated(InvalidInput, document.InvalidCorpus, f"data.tokenizer = {data.tokenizer!r}"):
        folder = local_file("data.tokenizer", data.tokenizer, base_dir, *BESIDE).parent
        named, config = (parse_document(name, read_document(folder / name) or "{}") for name in (_TOKENS, _CONFIG))
        found = read_document(folder / _TEMPLATE) or config.get("chat_template")
    tokens = dict[str, str]()
    for name, token in (named | config).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    if isinstance(found, list):  # several by name, of which `transformers` takes this one
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    return chat_template.ChatTemplate(text=found, tokens=tokens) if isinstance(found, str) else None


def read_document(path: Path) -> str | None:
    """Return the text of a document beside a tokenizer, None without one; raises InvalidInput for none of its kind."""
    try:
        text = regular_file.read_file(path, _MOST_DOCUMENT_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name} cannot be read: {error}; repair it or remove it") from error
    if path.name != _TEMPLATE:
        parse_document(path.name, text)
    return text


def parse_document(name: str, text: str) -> dict[str, Any]:
    """Return a JSON document as it is carried: without the Python files that `transformers` would run for it."""
    with restated((msgspec.DecodeError, RecursionError), InvalidInput, name, rule="one JSON object"):
        content = msgspec.json.decode(text, type=dict[str, Any])
    content.pop("auto_map", None)
    return content


def local_file(key: str, named: str, base_dir: Path, *beside: str) -> Path:
    """Return the path of the file that a key names; at a URL that of a copy, with copies of the files `beside` it."""
    if "://" not in named:
        return base_dir / expand_home(key, named)
    folder, _, name = named.rpartition("/")
    return copy_files(folder, (name, *beside)) / name


def copy_files(url: str, names: Iterable[str], most_bytes: int = _MOST_COPY_BYTES) -> Path:
    """Return the folder of copies, with those of these files that are there; raises InvalidInput."""
    if problem := redaction.find_credentials(url, instead="the environment"):
        raise InvalidInput(f"a URL {problem}; rule: it is written into the log")
    if problem := wrong_scheme(url):
        raise InvalidInput(f"{problem}; rule: {READABLE}")
    import fsspec.callbacks  # slow to import

    def require_few(size: int | None, value: int, **_: object) -> None:
        if max(size or 0, value) > most_bytes:
            raise InvalidInput(f"has more than {most_bytes:,} bytes; rule: at most so many")

    folder = _folder_of(url)
    for name in (name for name in names if not (folder / name).exists()):
        unfinished = folder / f"{name}.unfinished"
        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
            with suppress(FileNotFoundError):
                bound = fsspec.callbacks.Callback(hooks={"bound": require_few})
                fs.get_file(f"{root}/{name}", str(unfinished), callback=bound)
                unfinished.replace(folder / name)
        except InvalidInput as error:
            raise InvalidInput(f"{name} {error}") from error
        except Exception as error:  # every file system has errors of its own
            raise InvalidInput(f"{name} {why_unreadable(error, url)}; rule: every file there can be read") from error
    return folder


@cache
def _folder_of(url: str) -> Path:
    stack = ExitStack()
    folder = stack.enter_context(child_process.temporary_folder("cairn-copies-"))
    atexit.register(stack.close)
    return folder
