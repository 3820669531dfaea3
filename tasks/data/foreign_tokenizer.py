"""Loads a tokenizer.json of unknown origin: in a child process with bounded memory and time first, then in this one."""

import hashlib
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.data import tokenizer, tokenizer_file
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process, regular_file

_CORE_SECONDS = 120
_REMEDY = "Take another tokenizer, or bytes, or bpe:<size>"
_tried: set[str] = set()


def load_library_tokenizer(text: str) -> LibraryTokenizer:
    """Return the tokenizer that `text` is; raises InvalidInput in one line. A child process tries each text once."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if digest not in _tried and text != tokenizer.Tokenizer.bytes().json:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.seek(0)
            try:
                with child_process.bounded_process(
                    "cairn.model.data.tokenizer_file", file=file, remedy=_REMEDY, core_seconds=_CORE_SECONDS
                ) as stdout:
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
        inner = read_library_tokenizer(path)
        return tokenizer.Tokenizer(inner, end_of_text=end_of_text, end_of_text_id=end_of_text_id)
    except (OSError, UnicodeDecodeError, InvalidInput) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"tokenizer file {path}: {problem}") from error
