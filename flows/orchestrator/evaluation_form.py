"""Links to the filled-in form of the deployment `evaluate-promoted`: one click, and Submit, measure a checkpoint again.

Both of Prefect's UIs read a form's values from `parameters`. The pages that show a link lie two folders deep in both,
so a relative link stays in the UI.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from reports.pages.markdown import markdown_text

_DEPLOYMENT = "evaluate-promoted/evaluate-promoted"
_SUITES = Path("deployments/suites")
_KEPT = ("store", "store_credentials")


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
