"""EleutherAI's lm-evaluation-harness as an evaluator: its tasks on a model directory, its numbers as one JSON object.

Needs the extra `eval` (`pip install '.[eval]'` in Cairn's folder). Offline without --online: tasks by name need their
data in the cache of `datasets`; a task of one's own is a YAML file of the harness beside its JSON lines, both named on
the command line, so that editing either makes another suite.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any


def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run the harness and return its numbers by task and metric."""
    import lm_eval
    import yaml

    tasks: list[Any] = [name for name in given.tasks.split(",") if name]
    if given.task_file is not None:
        tasks.append(yaml.safe_load(given.task_file.read_text(encoding="utf-8")))
        if given.data is not None:
            files = {"data_files": {"test": str(given.data.resolve())}}
            tasks[-1] |= {"dataset_path": "json", "dataset_kwargs": files}
    device = os.environ.get("CAIRN_DEVICE", "cpu")
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(given.model), "dtype": "float32"},
        tasks=tasks,
        device="cpu" if device == "auto" else device,
        batch_size=given.batch_size,
        limit=given.limit,
        bootstrap_iters=0,
    )
    return {name: dict(finite_numbers(result)) for name, result in found["results"].items()}


def finite_numbers(result: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the finite numbers of a result; `acc,none` is the metric acc without a filter."""
    return [
        (name.removesuffix(",none"), float(value))
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]


def main() -> None:
    """Print one JSON object; whatever libraries print goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="", help="names of the harness's own tasks, by comma")
    parser.add_argument("--task-file", type=Path, help="YAML of a task of one's own")
    parser.add_argument("--data", type=Path, help="its documents, JSON lines")
    parser.add_argument("--limit", type=int, help="at most this many documents a task")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--online", action="store_true", help="let data sets be downloaded")
    parser.add_argument("model", type=Path)
    given = parser.parse_args()
    if not given.online:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        sys.exit(f"lm-evaluation-harness is not installed: {error}; pip install '.[eval]' in Cairn's folder")
    json.dump(measure(given), out)
    out.close()


if __name__ == "__main__":
    main()
