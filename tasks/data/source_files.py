"""Finds the files that `data.sources` names by paths, globs and URLs: sorted, each once, recognised, none excluded."""

import fnmatch
import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias
from urllib.parse import urlsplit

import pyarrow as pa

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.redaction import find_credentials
from cairn.storage.stores.regular_file import open_file
from cairn.tasks.configuration.addresses import READABLE, expand_home, why_unreadable, wrong_scheme
from cairn.tasks.data import document, foreign_tokenizer, text_format
from cairn.tasks.data.document_reader import EMPTY_FILE, ROW, UNITS, TextFile, decompress, invalid_source

_READERS = 8
"""Files of which the beginnings are read at once."""
_OF_CONVERSATIONS = (text_format.TextFormat.JSON_LINES, text_format.TextFormat.JSON, text_format.TextFormat.PARQUET)
_Found: TypeAlias = tuple[str, bool, list[tuple[str, int, Callable[[], BinaryIO]]]]
"""The path or URL that was looked for, whether it is a glob, and of each file place, size and how to open it."""


def find_files(data: DataConfig, groups: Mapping[str, str], base_dir: Path) -> list[TextFile]:
    """Return every file of the sources once, paths from `base_dir` on, each with the group of its source, or none.

    Raises InvalidCorpus for a source without a file, a format that is not read, and a file of two sources with groups.
    """
    found, kept = list[TextFile](), dict[str, TextFile]()
    for source in groups:
        if "://" in source and (problem := find_credentials(source, instead="the environment")):
            raise document.InvalidCorpus(f"data.sources: a URL {problem}; rule: sources are written into the log")
        refuse: text_format.Refuse = partial(invalid_source, source, placed=data.placed(source))
        if problem := wrong_scheme(source):
            raise refuse(problem, READABLE)
        is_remote, placed = "://" in source, data.placed(source)
        path, is_glob, listed = _find_remote(source, refuse) if is_remote else _find_local(source, base_dir, refuse)
        if not listed:
            rule = "a glob matches at least one file. Correct the pattern"
            raise refuse(f"the glob matches no file, looked for {path}", rule)
        files = [
            TextFile(source=source, place=place, bytes=size, opener=opener, is_matched=is_glob, placed=placed)
            for place, size, opener in listed
            if not _is_excluded(place, data.exclude, base_dir)
        ]
        if not files:
            rule = "a source keeps a file. Make data.exclude narrower"
            raise refuse("data.exclude leaves out all of its files", rule)
        found += files
    for file in sorted(found, key=lambda file: file.placed == "train"):
        place = file.place if "://" in file.place else os.path.realpath(file.place)
        first = kept.setdefault(place, file)
        if first.source != file.source and first.placed == file.placed and groups[file.source]:
            rule = "with data.weights one source a file, so that it has one weight. Make the globs narrower"
            raise file.invalid(f"also named by data.sources = {first.source!r}", rule)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="recognise") as pool:
        files = list(pool.map(partial(_recognise, data.format), kept.values()))
    local = [os.path.dirname(file.place) for file in files if "://" not in file.place]
    root = os.path.commonpath(local) if local else ""
    names = [one.place if "://" in one.place else Path(os.path.relpath(one.place, root)).as_posix() for one in files]
    for file in files if data.loss_on else ():
        if file.format not in _OF_CONVERSATIONS and file.unit != EMPTY_FILE:
            rule = "conversations are rows of JSON or Parquet"
            raise file.invalid(f"it is {file.format}, and data.loss_on = 'answers'", rule)
    template = foreign_tokenizer.find_template(data, base_dir) if data.loss_on else None
    named = zip(files, names, strict=True)
    return [replace(file, name=name, group=groups[file.source], template=template) for file, name in named]


def _expand(pattern: str) -> set[str]:
    """Return what a glob matches; unlike the library's, `**` does not go around in a loop of links."""
    parts = pattern.split("/")
    if "**" not in parts:
        return set(glob.glob(pattern))
    at = parts.index("**")
    folders = chain.from_iterable(map(_folders_below, glob.glob("/".join(parts[:at]) or "/")))
    rest = "/".join(parts[at + 1 :]) or "*"
    return {match for folder in folders for match in _expand(f"{glob.escape(folder)}/{rest}")}


def _folders_below(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the folder and all below it that are not hidden, without those that a link leads back to."""
    if (real := os.path.realpath(folder)) in above:
        return
    yield folder
    with suppress(OSError):
        names = [entry.path for entry in os.scandir(folder) if not entry.name.startswith(".")]
        for inner in filter(os.path.isdir, names):
            yield from _folders_below(inner, above | {real})


def _find_local(source: str, base_dir: Path, refuse: text_format.Refuse) -> _Found:
    path = os.path.abspath(base_dir / expand_home("data.sources", source))
    if os.path.isdir(path):
        raise refuse(*_is_directory(source, path))
    is_file = os.path.isfile(path)
    if not is_file and not glob.has_magic(source):
        rule = f"every source exists and is a file. Correct the path (relative paths start at {base_dir})"
        what = "a link to nothing, a pipe or a device" if "\0" not in path and os.path.lexists(path) else "no such file"
        raise refuse(f"{what}, looked at {path}", rule)
    matches = [path] if is_file else sorted(filter(os.path.isfile, _expand(_escape_folders(path))))
    if foreign := next((match for match in matches if not document.is_expressible(match)), None):
        rule = "names are UTF-8, as they are written into the snapshot. Rename it, or leave it out with data.exclude"
        raise refuse(f"a file is named {os.fsencode(foreign)!r}", rule)
    return path, not is_file, [(match, os.path.getsize(match), partial(open_file, match)) for match in matches]


def _escape_folders(path: str) -> str:
    """Return the pattern with the folders that exist under just that name escaped: a `[1]` there is no pattern."""
    folder, parts = "/", PurePosixPath(path).parts[1:]
    for number, part in enumerate(parts):
        if not os.path.isdir(folder + part):
            return glob.escape(folder) + "/".join(parts[number:])
        folder += part + "/"
    return glob.escape(path)


def _is_excluded(place: str, patterns: Sequence[str], base_dir: Path) -> bool:
    """Whether a pattern matches the file's name, or with a slash in it its path from `base_dir` or its URL."""
    path = urlsplit(place).path if "://" in place else place
    for pattern in patterns:
        if "://" in pattern:
            is_match = fnmatch.fnmatchcase(place, pattern)
        elif "/" in pattern:
            whole = os.path.normpath(os.path.join(glob.escape(str(base_dir.absolute())), pattern))
            is_match = fnmatch.fnmatchcase(path, f"{whole}/*" if pattern.endswith("/") else whole)
        else:
            is_match = fnmatch.fnmatchcase(path.rpartition("/")[2], pattern)
        if is_match:
            return True
    return False


def _recognise(wanted: str, file: TextFile) -> TextFile:
    """Return the file with format, compression and unit, by its name and first bytes."""
    try:
        with file.opener() as stream:
            head = stream.read(text_format.HEAD_BYTES)
        if head and (codec := text_format.recognise_codec(file.place, head, wanted, file.invalid)):
            file = replace(file, codec=codec)
            with file.opener() as stream:
                head = decompress(stream, codec, file.bytes).read(text_format.HEAD_BYTES)
    except (OSError, pa.ArrowException) as problem:
        raise file.unreadable(problem) from problem
    if not head:
        if not file.is_matched:
            raise file.invalid("the file is empty", "every source has text; fill the file, or leave it out")
        return replace(file, unit=EMPTY_FILE)
    form = text_format.recognise_format(file.place, head, wanted, file.invalid)
    return replace(file, format=form, unit=UNITS.get(form, ROW))


def _find_remote(source: str, refuse: text_format.Refuse) -> _Found:
    import fsspec  # slow to import

    # s3fs keeps listings for ever by default, which would hide new files.
    try:
        fs, path = fsspec.core.url_to_fs(source, use_listings_cache=False, skip_instance_cache=True)
        is_file = not glob.has_magic(path) or fs.exists(path)
        found = {path: fs.info(path)} if is_file else fs.glob(path, detail=True)
    except Exception as problem:  # every file system has errors of its own
        raise refuse(why_unreadable(problem, source), "every source can be read. Correct the URL") from problem
    if is_file and found[path]["type"] == "directory":
        raise refuse(*_is_directory(source, path))
    files = ((item, int(info["size"] or 0)) for item, info in sorted(found.items()) if info["type"] == "file")
    return path, not is_file, [(fs.unstrip_protocol(item), size, partial(fs.open, item, "rb")) for item, size in files]


def _is_directory(source: str, path: str) -> tuple[str, str]:
    return f"{path} is a directory", f"files or globs. Name what you mean in it, such as {source.rstrip('/')}/**/*.txt"
