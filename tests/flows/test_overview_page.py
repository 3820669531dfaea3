"""What a run's page says, as text; how the UIs draw it is looked at in tests/crash/test_prefect_ui.py."""

from flows.orchestrator.overview_page import overview_markdown
from tests.fabricated_run import FabricatedRun


def test_an_open_question_stands_above_the_curve_and_is_gone_once_it_is_answered(bard: FabricatedRun) -> None:
    page = overview_markdown(bard.log, "![curves]()", "**May it?**")
    assert page.index("**May it?**") < page.index("![curves]()") < page.index("## Attempts")
    assert "**May it?**" not in overview_markdown(bard.log, "![curves]()")
