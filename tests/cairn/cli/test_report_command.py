import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cairn.reports.pages.report_pages import html_report, markdown_report
from cairn.reports.pages.run_report import gather_report
from cairn.reports.plots import curve_plot
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.stores.local_store import LocalStore
from tests import entries
from tests.commands import Cairn
from tests.fabricated_run import HUMAN, FabricatedRun, fabricate, store_bard, write_steps
from tests.memory_store import MemoryStore

HOSTILE = '<script>alert(1)</script> </td> "quoted" \x1b[31m| `tick` ```'


@pytest.fixture(autouse=True)
def found(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the store, and so no advice names it; a page has a real picture only where it is the module's."""
    monkeypatch.setenv("CAIRN_STORE", store.url)
    monkeypatch.setattr(curve_plot, "draw_run", lambda curves, **size: f"{curves} {size}".encode())


FALLING = {"train_loss": lambda step: 5.0 - step / 20, "tokens_per_second": 10.0}


def markdown(run: FabricatedRun, environment: Mapping[str, str] | None = None) -> str:
    return markdown_report(gather_report(run.log, environment or {})[0])


def html(run: FabricatedRun) -> str:
    return html_report(*gather_report(run.log, {}))


class Seen(HTMLParser):
    """What a browser would find: tags, addresses, text, and whether every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.alternatives: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href"):
                self.addresses.append(value or "")
            if name in ("alt", "aria-label"):
                self.alternatives.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def hostile(store: LocalStore) -> FabricatedRun:
    """A run whose every free text is an attack."""
    run = fabricate(store, "hostile")
    run.start(host=HOSTILE)
    write_steps(run.log, 1, range(1, 13), **FALLING)
    reference = run.commit(10)
    run.evaluate(reference, loss=None)
    body = replace(entries.spoiled(3, detail=HOSTILE), reason=HOSTILE)
    run.log.append(lambda state: body, writer=HUMAN)
    run.end(HOSTILE.replace("\x1b", ""), action="stop")
    return run


def test_in_a_terminal_the_reports_lines_and_tables_fit_its_columns(bard: FabricatedRun) -> None:
    text = markdown_report(gather_report(bard.log, {})[0], columns=80)
    outside = "".join(text.split("```")[::2])
    assert [line for line in outside.splitlines() if len(line) > 80] == [] and "| ---" not in outside


def test_markdown_has_every_section(bard: FabricatedRun) -> None:
    assert re.findall("^## (.+)$", markdown(bard), re.MULTILINE) == [
        "In short", "Curve", "Timeline", "Why attempts ended", "Receipts", "Cost", "Budgets", "Evaluations", "Samples",
        "Checkpoints", "Promotions", "Data", "Environment",
    ]  # fmt: skip


def test_the_digest_of_the_newest_commit_is_in_the_headline(bard: FabricatedRun) -> None:
    assert bard.log.state.newest_committed.committed.state_sha256 in markdown(bard).split("## Curve")[0]


def test_rare_reasons_come_first_and_many_equal_ones_are_one_row(fresh: FabricatedRun) -> None:
    for reason in ["preempted"] * 30 + ["oom"] + ["preempted"] * 20:
        fresh.start()
        fresh.end(reason, action="resume", charged=reason)
    text = markdown(fresh)
    reasons = text.split("## Why attempts ended")[1].split("##")[0]
    receipts = text.split("## Receipts")[1].split("<details>")[0]
    assert reasons.index("| oom | 1 ") < reasons.index("| preempted | 50 ")
    assert len([line for line in receipts.splitlines() if line.startswith("| ")]) == 2 + 3
    assert "preempted × 30" in receipts and "<summary>30 attempts in a row, 1 to 30: preempted" in text


def test_a_run_without_attempts_has_a_report(fresh: FabricatedRun) -> None:
    assert "No step is on record yet." in markdown(fresh) and "No attempt yet." in html(fresh)


def test_money_is_an_estimate_and_absent_without_a_price(bard: FabricatedRun) -> None:
    priced = markdown(bard, {"CAIRN_COST__GPU_HOUR_PRICE": "3600", "CAIRN_COST__CURRENCY": "EUR"})
    assert "money" not in markdown(bard)
    assert "**money (an estimate)**: about 2.75 EUR, of it 0.50 EUR lost; 3600 EUR a device hour" in priced


def test_the_price_of_the_configuration_is_used(fresh: FabricatedRun) -> None:
    fresh.start(overrides=["cost.gpu_hour_price=1800"])
    fresh.end("lost", action="resume", charged="lost")
    assert "about 1.00 USD, of it 0.25 USD lost" in markdown(fresh)


def test_device_time_is_kept_lost_or_not_settled(bard: FabricatedRun) -> None:
    cost = gather_report(bard.log, {})[0].cost
    assert (cost.gpu_seconds, cost.useful_gpu_seconds, cost.wasted_gpu_seconds) == (2.75, 1.5, 0.5)
    assert cost.open_gpu_seconds == 0.75


def test_time_without_a_living_attempt_is_waiting_and_counts_from_the_opening(bard: FabricatedRun) -> None:
    first, second = bard.log.state.attempts
    assert bard.log.state.opened_at is not None and first.ended is not None and first.ended.last_seen_at is not None
    before = (first.started_at - bard.log.state.opened_at).total_seconds()
    between = (second.started_at - first.ended.last_seen_at).total_seconds()
    assert gather_report(bard.log, {})[0].cost.waiting_seconds == before + between > 2.0


def test_steps_trained_again_are_counted(bard: FabricatedRun) -> None:
    write_steps(bard.log, 1, range(1, 26), **FALLING)
    write_steps(bard.log, 2, range(21, 34), **FALLING)
    assert gather_report(bard.log, {})[0].cost.replayed_steps == 5


@pytest.fixture(scope="module")
def curved() -> FabricatedRun:
    """A run with a curve."""
    run = store_bard(MemoryStore("page"))
    write_steps(run.log, 1, range(1, 21), **FALLING)
    return run


@pytest.fixture(scope="module")
def page(curved: FabricatedRun) -> str:
    return html(curved)


def test_the_page_is_one_file_that_loads_and_runs_nothing(page: str) -> None:
    seen = Seen(page)
    assert not {"script", "link", "iframe", "object"} & set(seen.tags)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in seen.addresses)


def test_the_page_is_well_formed_and_readable_without_seeing(page: str) -> None:
    seen = Seen(page)
    assert seen.open == [] and seen.tags.count("h1") == 1 and "th" in seen.tags
    assert any("Loss over steps" in text for text in seen.alternatives)


def test_the_page_has_a_bar_for_each_attempt(page: str) -> None:
    titles = re.findall("<title>(attempt .+?)</title>", page)
    assert titles == ["attempt 1: preempted, steps 0 to 12, 5.0 s", "attempt 2: open, steps 20 to 33, 0.8 s"]


def test_a_page_cannot_be_steered_from_inside_a_run(hostile: FabricatedRun) -> None:
    seen = Seen(html(hostile))
    assert "script" not in seen.tags and "<script>alert(1)</script>" in seen.text and "\x1b" not in seen.text


def test_markdown_cannot_be_steered_from_inside_a_run(hostile: FabricatedRun) -> None:
    text = markdown(hostile)
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text


def test_no_text_of_a_run_breaks_a_table(hostile: FabricatedRun) -> None:
    for table in re.findall(r"(?:^\| .*\n)+", markdown(hostile), re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_sample_cannot_leave_its_fence(store: LocalStore) -> None:
    run = fabricate(store, "sampled")
    run.start()
    reference = run.commit(10)
    hash_and_suite = {"manifest_sha256": reference.manifest_sha256, "suite_sha256": "5" * 64}
    body = entries.evaluated(10, 2.0, samples=("```\n# not a heading\n\x1b[2J<b>",), **hash_and_suite)
    run.log.append(lambda state: body, writer=HUMAN)
    assert "````\n```\n# not a heading\n<b>\n````" in markdown(run)
    assert "&lt;b&gt;</pre>" in html(run)


def test_more_attempts_than_a_page_has_bars_stay_small_and_readable() -> None:
    run = fabricate(MemoryStore(), "long")
    for number in range(601):
        run.start()
        run.end("lost" if number % 50 == 7 else "preempted", action="resume", charged="lost")
    page = html(run)
    assert len(page) < 600_000 and "preempted × 49" in page
    assert len(re.findall("<rect class=.r-", page)) < 100


def test_equal_runs_give_equal_pages(curved: FabricatedRun) -> None:
    assert html(curved) == html(curved)


def test_with_html_the_file_is_written_and_named(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    write_steps(bard.log, 1, range(1, 21), **FALLING)
    ended = cairn("report", "bard", "--html", "page.html")
    assert (ended.code, ended.out) == (0, "") and "page.html" in ended.err
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_status_says_that_data_is_quarantined(fresh: FabricatedRun, cairn: Cairn) -> None:
    fresh.start()
    fresh.log.append(lambda state: entries.spoiled(3), writer=HUMAN)
    assert read_status(fresh.log).quarantined_windows == 1
    assert "1 window of the data, never drawn again" in cairn("status", "fresh").out


def test_a_run_that_needs_a_person_says_so_in_the_list(fresh: FabricatedRun, store: LocalStore) -> None:
    fresh.start()
    fresh.end("error", action="stop")
    assert [row.detail for row in list_runs(store)] == ["attempt 1 ended: error; `cairn explain fresh` says why"]
