"""The trainer's image, built from the lock files and run: as a user without a name, read-only, without a network.

`make test-image` asks for it: it needs root, a network for the build, a quarter of an hour and 20 GB. No daemon is
needed; the base is Debian's Python, since a registry may be out of reach.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.commands import ROOT
from tests.processes.waiting import patience_seconds, wait_for

ASKED = shlex.split(os.environ.get("CAIRN_TEST_IMAGE", ""))
BUILDAH = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
BASE = """FROM scratch
ADD base.tar /
RUN python3 -m venv /usr/local
"""
ROOM = """set -e
mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"
mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp"; mount -t tmpfs -o mode=1777 tmpfs "$1/var/cache/cairn"
mount --bind "$2" "$1/run/cairn"
"$3" -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1 | 64))'
root=$1; shift 3
exec chroot --userspec=4711:4711 "$root" env --ignore-environment PATH=/usr/local/bin:/usr/bin:/bin \\
    CAIRN_CACHE=/var/cache/cairn PYTHONUNBUFFERED=1 sh -c 'cd /run/cairn && exec tini -- "$@"' sh "$@"
"""
"""Gives a process what a container has: `ROOT WORK PYTHON COMMAND…`, in namespaces of its own."""
SHORT = ("--set", "training.steps=40", "--set", "checkpoint.every_steps=10", "--set", "evaluation.batches=1")
MOST_BUILD_SECONDS = 3600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.linux,
    pytest.mark.timeout(2 * MOST_BUILD_SECONDS),
    pytest.mark.xdist_group("image"),
    pytest.mark.skipif(not ASKED or os.geteuid() != 0, reason="is asked for by `make test-image`, as root"),
]


def buildah(*words: str, folder: Path = ROOT) -> str:
    command = ["buildah", *words]
    done = subprocess.run(command, cwd=folder, env=BUILDAH, text=True, capture_output=True, timeout=MOST_BUILD_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root folder of a container of the image, which `make image` has built."""
    folder = tmp_path_factory.mktemp("image")
    if not buildah("images", "--quiet", "--filter", "reference=localhost/cairn-python"):
        debian = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", "base.tar"]
        subprocess.run(debian, cwd=folder, check=True, capture_output=True, timeout=MOST_BUILD_SECONDS)
        (folder / "Containerfile").write_text(BASE, encoding="utf-8")
        buildah("build", "--tag", "cairn-python", ".", folder=folder)
        (folder / "base.tar").unlink()
    further = shlex.join(["--build-arg", "PYTHON_IMAGE=localhost/cairn-python", *ASKED[1:]])
    make = ["make", "image", "BUILDER=buildah", "TAG=cairn-test", f"ARGS={further}"]
    made = subprocess.run(make, cwd=ROOT, env=BUILDAH, capture_output=True, text=True, timeout=MOST_BUILD_SECONDS)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    container = buildah("from", "localhost/cairn-test")
    yield Path(buildah("mount", container))
    buildah("rm", container)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder of a machine that the container may write to, for good."""
    folder = tmp_path_factory.mktemp("work")
    folder.chmod(0o777)
    return folder


def start(image: Path, work: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a command in the image; its output goes to a file."""
    namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    inside = ["sh", "-c", ROOM, "sh", str(image), str(work), "/usr/bin/python3", *words]
    with (work / "said.txt").open("wb") as output:
        return subprocess.Popen([*namespaces, *inside], stdout=output, stderr=output)


def test_a_user_without_a_name_trains_in_it_until_process_1_hears_that_the_machine_goes(
    image: Path, work: Path
) -> None:
    process = start(image, work, "cairn", "train", "quickstart", *SHORT)
    wait_for(lambda: "committed step 10 " in said(work), process, "a commit", lambda: said(work))
    (first,) = psutil.Process(process.pid).children()
    first.send_signal(signal.SIGTERM)
    assert process.wait(patience_seconds()) == 75, said(work)
    assert "; the same command continues" in said(work)


def test_the_same_command_continues_there_to_the_end(image: Path, work: Path) -> None:
    process = start(image, work, "cairn", "train", "quickstart", *SHORT)
    assert process.wait(patience_seconds()) == 0, said(work)
    assert (work / "cairn-store" / "runs" / "quickstart").is_dir() and "attempt 2" in said(work)


def said(work: Path) -> str:
    return (work / "said.txt").read_text(encoding="utf-8", errors="replace")
