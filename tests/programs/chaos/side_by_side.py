"""Several campaigns at once, each a process with a server, ports and a folder of its own, and its share of the runs.

Owns starting them, passing on what they say, and ending them with this one.
"""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_LATER = ("--jobs", "--out")


def run_side_by_side(words: Sequence[str], folder: Path, jobs: int) -> list[Path]:
    """Run as many campaigns as there are jobs; returns their folders.

    Raises `RuntimeError` where one ended without a summary: what it would have found is not known.
    """
    places = [folder / f"job-{number}" for number in range(jobs)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.programs.chaos.campaign", *words_of_job(words, number, jobs, place)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, place in enumerate(places)
    ]
    listeners = [threading.Thread(target=_pass_on, args=(process,), daemon=True) for process in started]
    for listener in listeners:
        listener.start()
    try:
        for process in started:
            process.wait()
    finally:
        for process, listener in zip(started, listeners, strict=True):
            process.terminate()
            process.wait()
            listener.join()
    silent = [place for place in places if not (place / "summary.json").exists()]
    if silent:
        raise RuntimeError(f"no summary in {', '.join(map(str, silent))}; the job's words are above")
    return places


def words_of_job(words: Sequence[str], number: int, jobs: int, place: Path) -> list[str]:
    """Return the command line of one job: the same campaign, every so many-th run of it, one at a time."""
    kept, skip = list[str](), False
    for word in words:
        if not skip and word not in _LATER and not word.startswith(tuple(f"{name}=" for name in _LATER)):
            kept.append(word)
        skip = not skip and word in _LATER
    return [*kept, "--share", str(number), str(jobs), "--out", str(place)]


def _pass_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    with process.stdout as words:
        for line in words:
            is_of_a_run = line.startswith("  ") and not line.startswith(("   ", "  seed "))
            if line.startswith("seed ") or is_of_a_run:
                print(line, end="", flush=True)
