"""Copies files of a folder at a URL into one of this process, which goes with it: weights and their tokenizer."""

import atexit
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from cairn.model.errors import InvalidInput
from cairn.storage.stores import child_process, redaction
from cairn.tasks.configuration.addresses import READABLE, expand_home, why_unreadable, wrong_scheme

MOST_DOCUMENT_BYTES = 64 << 20


def local_file(key: str, named: str, base_dir: Path, *beside: str) -> Path:
    """Return the path of the file that a key names; at a URL that of a copy, with copies of the files `beside` it."""
    if "://" not in named:
        return base_dir / expand_home(key, named)
    folder, _, name = named.rpartition("/")
    return copy_files(folder, (name, *beside)) / name


def copy_files(url: str, names: Iterable[str], most_bytes: int = MOST_DOCUMENT_BYTES) -> Path:
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
