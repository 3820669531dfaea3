"""A disk that loses what was not synced when the power fails: what a local store does to it, and what may be left.

The model is that of POSIX: data are on disk after fsync of the file, a name is after fsync of its folder. What is not
may be there or not: of names any, in order or not; of data any part. Owns recording and replay; knows no protocol.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.storage.faulty_store import Death

_BLOCK_BYTES = 512


@dataclass(eq=False)
class File:
    """A file, by whatever names; `path` is its first."""

    path: str


@dataclass(eq=False)
class Folder:
    """A folder with whatever names in it."""


Node = File | Folder
Names = dict[str, Node]


@dataclass(frozen=True)
class Renamed:
    """Names of one folder that change together: what each means from now on, None for a name that goes."""

    folder: Folder
    changes: tuple[tuple[str, Node | None], ...]

    def apply(self, names: Names) -> None:
        """Change the names of the folder."""
        for name, node in self.changes:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node


@dataclass(frozen=True)
class Wrote:
    """The data of a file from now on, of which any part may be on disk."""

    file: File
    data: bytes


@dataclass(frozen=True)
class Synced:
    """Data of a file, or names of a folder, are on disk."""

    node: Node


Event = Renamed | Wrote | Synced


@dataclass
class Disk:
    """Everything that was done below one folder, in order; whoever does it may die after so many calls."""

    root: Path
    events: list[Event] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    dies_after: int | None = None
    is_dead: bool = False
    calls: int = 0
    _descriptors: dict[int, Node] = field(default_factory=dict)
    _unsynced: dict[File, bytes] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what the block does to the disk by the calls that the local store uses."""
        self.nodes.setdefault(str(self.root), Folder())
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "fsync", "mkdir", "link", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, self._noted(getattr(os, name), getattr(self, f"_{name}")))
            yield

    def _noted(self, call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            if self.is_dead:
                raise Death
            self._note_data()
            result = call(*arguments, **named)
            note(result, *arguments)
            self.calls += 1
            if self.calls == self.dies_after:
                self.is_dead = True
                raise Death
            return result

        return noted

    def _note_data(self) -> None:
        for file, known in self._unsynced.items():
            data = Path(file.path).read_bytes()
            if data != known:
                self._unsynced[file] = data
                self.events.append(Wrote(file, data))

    def _open(self, descriptor: int, path: Any, flags: int = 0, *_: Any) -> None:
        name = os.fspath(path)
        if not flags & os.O_CREAT or not name.startswith(f"{self.root}/"):
            self._descriptors[descriptor] = self.nodes.get(name, Folder())
            return
        file = File(name)
        self._descriptors[descriptor], self._unsynced[file] = file, b""
        self._change(name, file)

    def _fsync(self, _: None, descriptor: int) -> None:
        node = self._descriptors[descriptor]
        if isinstance(node, File):
            self._unsynced.pop(node, None)
        self.events.append(Synced(node))

    def _mkdir(self, _: None, path: Any, *mode: Any) -> None:
        self._change(os.fspath(path), Folder())

    def _link(self, _: None, source: Any, target: Any) -> None:
        self._change(os.fspath(target), self.nodes[os.fspath(source)])

    def _replace(self, _: None, source: Any, target: Any) -> None:
        self._change(os.fspath(target), self.nodes[os.fspath(source)], gone=os.fspath(source))

    def _unlink(self, _: None, path: Any) -> None:
        file = self.nodes[os.fspath(path)]
        if isinstance(file, File) and file.path == os.fspath(path):
            self._unsynced.pop(file, None)
        self._change(os.fspath(path), None)

    _rmdir = _unlink

    def _change(self, path: str, node: Node | None, *, gone: str = "") -> None:
        parent, name = os.path.split(path)
        folder = self.nodes[parent]
        assert isinstance(folder, Folder)
        assert not gone or os.path.dirname(gone) == parent, "names move within one folder"
        removed = ((os.path.basename(gone), None),) if gone else ()
        self.events.append(Renamed(folder, (*removed, (name, node))))
        for changed, now in ((gone, None), (path, node)):
            if now is None:
                self.nodes.pop(changed, None)
            else:
                self.nodes[changed] = now


def cut(disk: Disk, at: int, chance: random.Random) -> dict[str, bytes | None]:
    """Return what may be on the disk if the power fails after so many events: data by path, None for a folder."""
    names: dict[Folder, Names] = {}
    pending: dict[Folder, list[Renamed]] = {}
    data, dirty = dict[File, bytes](), dict[File, bytes]()
    for event in disk.events[:at]:
        match event:
            case Renamed(folder):
                pending.setdefault(folder, []).append(event)
            case Wrote(file, written):
                dirty[file] = written
            case Synced(File() as file):
                data[file] = dirty.pop(file, data.get(file, b""))
            case Synced(Folder() as folder):
                for change in pending.pop(folder, []):
                    change.apply(names.setdefault(folder, {}))
    for folder, changes in pending.items():
        for change in _survivors(changes, chance):
            change.apply(names.setdefault(folder, {}))
    data |= {file: _torn(written, data.get(file, b""), chance) for file, written in dirty.items()}
    root = disk.nodes[str(disk.root)]
    assert isinstance(root, Folder)
    return dict(_walk(root, "", names, data))


def _survivors(changes: list[Renamed], chance: random.Random) -> list[Renamed]:
    if chance.random() < 0.5:  # in order, as a journal writes them
        return changes[: chance.randint(0, len(changes))]
    share = chance.random()
    return [change for change in changes if chance.random() < share]


def _torn(written: bytes, before: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return before
    torn = bytearray(written[: chance.randint(0, len(written))] if chance.random() < 0.5 else written)
    for start in range(0, len(torn), _BLOCK_BYTES):
        if chance.random() < 0.3:  # the size is on disk, the block is not
            torn[start : start + _BLOCK_BYTES] = bytes(len(torn[start : start + _BLOCK_BYTES]))
    return bytes(torn)


def _walk(
    folder: Folder, prefix: str, names: dict[Folder, Names], data: dict[File, bytes]
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names.get(folder, {}).items():
        if isinstance(node, File):
            yield f"{prefix}{name}", data.get(node, b"")
        else:
            yield f"{prefix}{name}", None
            yield from _walk(node, f"{prefix}{name}/", names, data)


def lay_out(left: dict[str, bytes | None], root: Path) -> None:
    """Make the folder as the disk was found."""
    root.mkdir(parents=True)
    for name, data in left.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
