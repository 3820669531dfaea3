"""A working folder with files of the names that Cairn, its libraries and Prefect look for; opening one is noted."""

import ctypes
import os
import struct
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

NAMES = (
    *("model", "tasks", "storage", "reports", "json", "torch", "numpy", "prefect", "sitecustomize", "usercustomize"),
    *("conftest", "duckdb", "fsspec", "pydantic", "typing_extensions", "uvicorn", "yaml"),
)
FOLDERS = ("cairn", "deployments", "flows")
SETTINGS = {
    "prefect.toml": 'home = "of-a-stranger"\n[logging]\nconfig_path = "logging.yml"\n[api]\nurl = "http://127.0.0.1:9/api"\n',
    "pyproject.toml": '[tool.prefect]\nhome = "of-a-stranger"\n[tool.prefect.logging]\nlevel = "DEBUG"\n',
    ".env": "PREFECT_API_URL=http://127.0.0.1:9/api\nPREFECT_PROFILES_PATH=logging.yml\nCAIRN_STORE=of-a-stranger\n",
    "logging.yml": "version: 1\nfilters: {mark: {(): builtins.open, file: of-a-stranger, mode: w}}\n",
    "prefect.yaml": "name: of-a-stranger\n",
    ".prefectignore": "*\n",
}
REFUSAL = "raise SystemExit('a file of the working folder was run: ' + __file__)\n"
_IN_OPEN, _EVENT = 0x20, struct.Struct("iIII")


class ForeignFolder:
    """The folder; whatever imports one of its modules leaves, also where it could note nothing."""

    def __init__(self, folder: Path) -> None:
        """Write the files, and have the kernel note from now on who opens one: inotify(7)."""
        self.folder = folder
        modules = [*(f"{name}.py" for name in NAMES), *(f"{name}/__init__.py" for name in FOLDERS)]
        self._strange = dict.fromkeys(modules, REFUSAL) | SETTINGS
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._library.inotify_init1(os.O_NONBLOCK)
        self._watched = dict[int, str]()
        for name in ("", *FOLDERS):
            (folder / name).mkdir(exist_ok=True)
            watch = self._library.inotify_add_watch(self._descriptor, os.fsencode(folder / name), _IN_OPEN)
            self._watched[watch] = f"{name}/" if name else ""
        for name, text in self._strange.items():
            (folder / name).write_text(text)
        self.traces()

    def traces(self) -> Set[str]:
        """Return which of the stranger's files were opened since it was asked last, and what their settings made."""
        found = set[str]()
        with suppress(BlockingIOError):
            while events := os.read(self._descriptor, 1 << 16):
                while events:
                    watch, _, _, length = _EVENT.unpack_from(events)
                    name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
                    found.add(self._watched[watch] + name)
                    events = events[_EVENT.size + length :]
        return (found & self._strange.keys()) | {str(path) for path in self.folder.rglob("of-a-stranger*")}

    def close(self) -> None:
        """Let the kernel forget it."""
        os.close(self._descriptor)
