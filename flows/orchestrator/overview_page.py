"""What a run's page in Prefect says, with links to the filled-in form that measures a checkpoint again.

Both of Prefect's UIs read a form's values from `parameters`; a relative link, two folders up, stays in the UI.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from reports.pages.markdown import markdown_table, markdown_text
from reports.queries.display_tables import (
    Table,
    budgets_table,
    comparison_table,
    evaluations_table,
    receipts_table,
)
from reports.queries.evaluation_comparison import EvaluationComparison
from reports.queries.evaluations import EvaluationSummary, list_evaluations
from reports.queries.receipts import read_receipts
from reports.queries.run_status import read_status
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.stores.document import sha256
from tasks.configuration.evaluation_settings import METRIC

_DEPLOYMENT = "evaluate-promoted/evaluate-promoted"
_SUITES = Path("deployments/suites")
_KEPT = ("store", "store_credentials")
_MOST_EVALUATIONS = 200
_OF_ATTEMPTS = ("attempt", "started (UTC)", "lasted", "reason", "steps", "device time", "lost", "decision")
_OF_EVALUATIONS = ("step", "status", "suite", "val_loss", "perplexity", "bits/byte", "verdict")
"""The columns that fit beside Prefect's menus; `cairn attempts` and `cairn evaluations` have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationForm:
    """The form; `kept` are parameters of the flow run that shows it, `suites` the suite files of its folder."""

    deployment_id: UUID
    kept: Mapping[str, Any]
    suites: tuple[Path, ...]

    def links(self, reference: str) -> str:
        """Return the line of links for a checkpoint: under its run's suites again, and under each suite file."""
        forms: dict[str, dict[str, Any]] = {"its run's own suites": {"again": True}}
        forms |= {path.stem: {"suite": str(path)} for path in self.suites}
        links = (f"[{markdown_text(name)}]({self._address(reference, form)})" for name, form in forms.items())
        return f"Measure `{reference}` again under {', '.join(links)}"

    def _address(self, reference: str, form: Mapping[str, Any]) -> str:
        values = quote(json.dumps({"reference": reference, **self.kept, **form}), safe="")
        return f"../../deployments/deployment/{self.deployment_id}/run?parameters={values}"


def kept_parameters() -> dict[str, Any]:
    """Return the parameters of this flow run that its evaluations need too."""
    return {name: value for name, value in flow_run.get_parameters().items() if name in _KEPT and value}


def find_evaluation_form(client: SyncPrefectClient, kept: Mapping[str, Any]) -> EvaluationForm | None:
    """Return the form, None where the deployment is not registered; raises the API's other errors."""
    with suppress(ObjectNotFound):
        deployment_id = client.read_deployment_by_name(_DEPLOYMENT).id
        return EvaluationForm(deployment_id=deployment_id, kept=kept, suites=tuple(sorted(_SUITES.glob("*.toml"))))
    return None


def overview_markdown(log: RunLog, curve: str, question: str = "", form: EvaluationForm | None = None) -> str:
    """Return the page: what the run is and its state, what a person is asked, the curve, the tables, and links."""
    opened, status = log.state.opened, read_status(log)
    parts = [f"# {markdown_text(log.run_id)}"]
    if opened is not None:
        what = f"{markdown_text(opened.model_family)}, {opened.total_steps:,} steps, data {opened.data_snapshot}"
        parts.append(f"{what}. **{status.state}** at step {status.step:,}: {markdown_text(status.next)}")
    parts += [part for part in (question, curve) if part]
    parts.append(f"## Attempts\n\n{_narrow(receipts_table(read_receipts(log)[::-1]), _OF_ATTEMPTS)}")
    parts.append(f"## Budgets\n\n{markdown_table(budgets_table(status.budgets))}")
    if evaluations := list_evaluations(log.state):
        parts.append(f"## Evaluations\n\n{_newest(evaluations)}")
        measured = [item for item in evaluations if METRIC in item.metrics]
        if form is not None and measured:
            best = min(measured, key=lambda item: item.metrics[METRIC])
            parts.append(form.links(f"{log.run_id}@{best.step}"))
    if links := _links(log.state):
        parts.append(f"## Flow runs\n\n{links}")
    return "\n\n".join(parts)


def evaluation_markdown(view: EvaluationComparison, words: str, form: EvaluationForm | None) -> str:
    """Return the page of `evaluate-promoted`: the columns of a run's page, what each row is, and all in words."""
    reference = f"{view.run_id}@{view.step}"
    parts = [f"# {markdown_text(reference)}", _narrow(comparison_table(view), ("", "checkpoint", *_OF_EVALUATIONS))]
    parts.append(markdown_text(words))
    return "\n\n".join([*parts, form.links(reference)] if form is not None else parts)


def flow_run_name(run_id: str, attempt: int) -> str:
    """Return the name of a flow run, under which those of one run stand together."""
    return f"{run_id}, attempt {attempt}" if attempt else run_id


def artifact_key(run_id: str, name: str = "") -> str:
    """Return the key of an artifact, another one for every run; Prefect allows lower case, digits and dashes."""
    plain = re.sub("[^a-z0-9]+", "-", run_id.lower()).strip("-")
    key = plain if plain == run_id else f"{plain}-{sha256(run_id.encode())[:8]}"
    return "-".join(part for part in ("cairn", key, name) if part)


def _narrow(table: Table, columns: Sequence[str]) -> str:
    """Return the table with these of its columns."""
    kept = [number for number, name in enumerate(table.columns) if name in columns]
    rows = tuple(tuple(row[number] for number in kept) for row in table.rows)
    return markdown_table(replace(table, columns=tuple(table.columns[number] for number in kept), rows=rows))


def _newest(evaluations: Sequence[EvaluationSummary]) -> str:
    """Return the newest evaluations as a table, newest first."""
    newest = list(reversed(evaluations))[:_MOST_EVALUATIONS]
    older = len(evaluations) - len(newest)
    table = _narrow(evaluations_table(newest), _OF_EVALUATIONS)
    return f"{table}\n\nand {older:,} older ones: `cairn evaluations`" if older else table


def _links(state: RunState) -> str:
    """Return a link to each flow run that the run has had, where there were several."""
    attempts: dict[str, list[str]] = {}
    for item in state.attempts:
        if item.started.flow_run_id:
            attempts.setdefault(item.started.flow_run_id, []).append(str(item.started.attempt))
    if len(attempts) < 2:
        return ""
    return "\n".join(f"- [attempt {', '.join(done)}](../../runs/flow-run/{name})" for name, done in attempts.items())
