"""The record that each command prints with --json, and its fields for the command's help."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

RECORDS: Mapping[str, str] = {
    "train": "reports.queries.run_status:RunStatus",
    "train --dry-run": "flows.preparation.training_plan:TrainingPlan",
    "train --overfit-one-batch": "cairn.operations.batch_overfit:BatchOverfit",
    "fork": "cairn.operations.run_fork:Fork",
    "config": "tasks.configuration.key_reference:ConfigurationKey*",
    "watch": "flows.watching.run_watcher:WatchRow*",
    "runs": "reports.queries.run_status:RunSummary*",
    "status": "reports.queries.run_status:RunStatus",
    "explain": "reports.explain.post_mortem:PostMortem",
    "report": "reports.pages.run_report:RunReport",
    "attempts": "reports.queries.receipts:Receipt*",
    "checkpoints": "reports.queries.checkpoints:CheckpointSummary*",
    "evaluations": "reports.queries.evaluations:EvaluationSummary*",
    "log": "storage.logs.log_entry:Entry*",
    "plot": "reports.plots.run_plot:WrittenPlot",
    "compare": "reports.queries.run_comparison:RunComparison",
    "ui": "cairn.ui.live_server:LiveAddress",
    "diagnose": "reports.queries.run_diagnosis:Diagnosis",
    "simulate": "reports.queries.run_simulation:SimulationSummary",
    "models": "reports.queries.alias_history:AliasPromotion*",
    "models --history": "reports.queries.alias_history:AliasDecision*",
    "sample": "cairn.operations.text_sampling:Sample",
    "evaluate": "reports.queries.evaluations:EvaluationComparison",
    "promote": "reports.queries.alias_history:AliasPromotion",
    "rollback": "reports.queries.alias_history:AliasPromotion",
    "export": "cairn.operations.model_export:ExportedModel",
    "data": "reports.queries.data_summary:DataSummary",
    "import-tokens": "cairn.cli.model_commands:ImportView",
    "export-tokens": "cairn.cli.model_commands:ExportedFile*",
    "verify": "cairn.operations.run_verification:Verification",
    "replay": "cairn.operations.replay_plan:Replay",
    "sweep": "storage.checkpoints.sweep:SweepReport",
    "delete": "cairn.operations.run_deletion:RunDeletion",
    "doctor": "cairn.operations.machine_check:Check*",
    "completion": "cairn.cli.machine_commands:CompletionView",
}
"""The record that each command but `sql` prints with `--json`; a star stands for a list of them."""


def find_record(line: str) -> tuple[type, bool]:
    """Return the record that a command line prints, and whether it prints a list of them."""
    name = RECORDS[line]
    return resolve_name(name.removesuffix("*")), name.endswith("*")


def describe_fields(verb: str) -> str:
    """Return the fields that a command prints with --json, those of nested records in parentheses."""
    described = list[str]()
    for line in (line for line in RECORDS if line.split()[0] == verb):
        record, is_list = find_record(line)
        options = "".join(f" of {word}" for word in line.split()[1:])
        named = ", ".join(_describe_field(name, hint) for name, hint in get_type_hints(record).items())
        text = f"JSON{options}: {'a list of ' if is_list else ''}{named}."
        described.append(textwrap.fill(text, 78, break_on_hyphens=False))
    return "\n".join(described) or "JSON: a list of objects, one a row, with the columns as names."


def _describe_field(name: str, hint: Any) -> str:
    inner = list[str]()
    for record in _records(hint):
        path = f"{record.__module__}:{record.__name__}"
        printing = [line for line, printed in RECORDS.items() if printed.removesuffix("*") == path]
        inner += [f"as {printing[-1]} prints it"] if printing else list(get_type_hints(record))
    return f"{name} ({', '.join(inner)})" if inner else name


def _records(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _records(part)
