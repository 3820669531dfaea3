"""The live page as a browser asks for it: what it shows, when it reads again, what it says of a lost store."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.pages.report_pages import OverviewRow, select_rows
from cairn.storage.logs.log_entry import ForkOrigin
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.ui import live_page
from tests.cairn.live_server import LiveServer, served
from tests.entries import NOON, opened, writer
from tests.fabricated_run import FabricatedRun, configuration, fabricate, store_bard, write_steps

FALLING = {"train_loss": lambda step: 4.0 - step / 20, "tokens_per_second": 5.0, "mfu": 0.5, "seconds": 2.0}
FALLING |= {"memory_bytes": 0, "rss_bytes": 3, "disk_free_bytes": 4}


COST = {"CAIRN_COST__GPU_HOUR_PRICE": "3600", "CAIRN_COST__CURRENCY": "EUR"}


def write_curve(run: FabricatedRun) -> None:
    """Write what both attempts of `bard` trained."""
    write_steps(run.log, 1, range(1, 23), **FALLING)
    write_steps(run.log, 2, range(21, 34), **FALLING)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The live page of a store with the run `bard`, which no test changes."""
    folder = tmp_path_factory.mktemp("live")
    store = LocalStore(folder / "store")
    write_curve(store_bard(store))
    with served(store, folder / "work", COST) as page:
        yield page


@pytest.fixture
def changing(bard: FabricatedRun, store: LocalStore, tmp_path: Path) -> Iterator[LiveServer]:
    """The live page of a store with the run `bard`, for a test that changes it."""
    write_curve(bard)
    with served(store, tmp_path / "work", COST) as page:
        yield page


def words(html: str) -> str:
    """Return the text of a page, blanks for tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", html.rpartition("<main")[2]).split())


def curves(live: LiveServer, *runs: str) -> list[dict[str, Any]]:
    answer = live.ask(f"/curves?{'&'.join(f'run={run}' for run in runs)}")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    return list(json.loads(answer.text))


def test_the_list_shows_state_losses_cost_and_the_last_sign_of_life(live: LiveServer) -> None:
    page = live.ask("/")
    assert page.status == 200
    shown = words(page.text)
    assert "1 run " in shown and "bard gpt2-tiny running 33 / 40 8 tokens/s, 14 s to go 1.25 2 " in shown
    assert "2.8 s 2.75 EUR 0.5 s lost" in shown, "device time, money, and what of it was lost"
    assert f'<time datetime="{NOON:%Y-%m-%dT%H:%M}' in page.text


def test_the_list_is_searched_and_sorted_by_its_address(changing: LiveServer, store: LocalStore) -> None:
    fabricate(store, "ann").start()
    fabricate(store, "zoe")
    sorted_down = changing.ask("/?sort=run_id&down=1").text
    assert re.findall(r'href="/runs/(\w+)"', sorted_down) == ["zoe", "bard", "ann"]
    assert 'aria-sort="descending"' in sorted_down and "sort=run_id&amp;down=0" in sorted_down
    found = changing.ask("/?q=OPENED+gpt2")
    assert re.findall(r'href="/runs/(\w+)"', found.text) == ["zoe"] and "1 run of 3" in words(found.text)
    assert "No run matches" in changing.ask("/?q=nothing").text
    assert changing.ask("/?sort=__class__").status == 200


def test_a_long_list_comes_in_pages_of_a_hundred_that_keep_the_search(changing: LiveServer, store: LocalStore) -> None:
    for number in range(205):
        RunLog(store, f"many-{number:03}").append(lambda _, name=f"many-{number:03}": opened(name), writer=writer())
    pages = [changing.ask(f"/?q=many&sort=run_id&down=0&page={number}").text for number in (1, 2, 3, 4)]
    shown = [re.findall(r'name="run" value="(many-\d+)"', page) for page in pages]
    assert [len(names) for names in shown] == [100, 100, 5, 0]
    assert sorted(itertools.chain(*shown)) == [f"many-{number:03}" for number in range(205)]
    assert "205 runs of 206" in words(pages[1]) and "page 2 of 3" in words(pages[1])
    links = re.findall(r'rel="(prev|next)" href="([^"]*)"', pages[1])
    assert [(rel, href.replace("&amp;", "&")) for rel, href in links] == [
        ("prev", "/?q=many&sort=run_id&down=0&page=1"),
        ("next", "/?q=many&sort=run_id&down=0&page=3"),
    ]
    assert "There is no such page" in words(pages[3]) and "rel=" not in pages[3].partition("<main")[2]


@pytest.mark.parametrize("page", ["0", "-1", "99999999999999999999"])
def test_a_page_that_cannot_be_is_the_first_or_none(live: LiveServer, page: str) -> None:
    assert live.ask(f"/?page={page}").status == 200


def test_a_page_is_made_once_for_all_who_ask(changing: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    render = live_page.render_page
    monkeypatch.setattr(live_page, "render_page", lambda name, *a, **k: made.append(name) or render(name, *a, **k))
    first, again, other = (changing.ask(path, wait=0).text for path in ("/", "/", "/?sort=state"))
    assert first == again != other and made == ["runs", "runs"]


@pytest.mark.parametrize(("field", "down"), [("val_loss", 0), ("train_loss", 0), ("gpu_seconds", 1), ("attempts", 1)])
def test_a_first_click_on_a_heading_brings_the_best_or_the_most_to_the_top(
    live: LiveServer, field: str, down: int
) -> None:
    assert f"sort={field}&amp;down={down}" in live.ask("/").text


def test_a_run_that_ended_shows_the_train_loss_of_its_last_step(bard: FabricatedRun, changing: LiveServer) -> None:
    bard.end("preempted", action="resume", charged="preempted")
    assert f'data-label="train">{4.0 - 33 / 20:.4g}</td>' in changing.ask("/").text


def test_runs_whose_value_is_unknown_come_last_however_they_are_sorted() -> None:
    nothing = dict.fromkeys(OverviewRow._fields)
    rows = [
        OverviewRow(**nothing | {"run_id": name, "val_loss": loss})
        for name, loss in (("a", None), ("b", 2.0), ("c", 1.0))
    ]  # type: ignore[arg-type]
    for descending, expected in ((False, "cba"), (True, "bca")):
        found = select_rows(rows, search="", sort="val_loss", descending=descending)
        assert "".join(row.run_id for row in found) == expected


def test_a_run_is_shown_with_every_section_of_its_report_and_a_link_to_each_attempt(live: LiveServer) -> None:
    page = live.ask("/runs/bard")
    titles = re.findall(r"<h2>([^<]*)</h2>", page.text)
    assert {"In short", "Curve", "Receipts", "Budgets", "Evaluations", "Checkpoints"} <= set(titles)
    assert 'href="/runs/bard/attempts/1"' in page.text and "attempt 2 trains on to step 40" in words(page.text)
    assert '<td class="n">33</td>' in page.text, "the curve in numbers, for who does not see it"


def test_what_a_run_wrote_stands_beside_its_curve_step_by_step(live: LiveServer) -> None:
    beside = live.ask("/runs/bard").text.partition('<aside class="texts"')[2].partition("</aside>")[0]
    assert re.findall(r"<summary>step (\d+)</summary><pre>([^<]*)</pre>", beside) == [
        ("20", "The end"),
        ("10", "The end"),
    ]


def test_what_a_probe_wrote_is_among_the_samples(changing: LiveServer, bard: FabricatedRun) -> None:
    write_steps(bard.log, 2, [34], **FALLING, sample="<b>To be")
    assert "<summary>step 34</summary><pre>&lt;b&gt;To be</pre>" in changing.ask("/runs/bard").text


def test_compared_runs_show_what_they_wrote_at_each_step_side_by_side(changing: LiveServer, store: LocalStore) -> None:
    other = fabricate(store, "other")
    other.start()
    other.evaluate(other.commit(20), loss=2.5)
    page = changing.ask("/compare?run=bard&run=other").text.partition('<section id="samples"')[2]
    newest, older = page.split("</details>")[:2]
    assert newest.count("<pre>The end</pre>") == 2 and older.count("<pre>The end</pre>") == 1
    assert "wrote nothing at this step" in words("<main>" + older)


def test_speed_memory_and_waits_of_the_machine_are_shown_and_drawn(live: LiveServer) -> None:
    (view,) = curves(live, "bard")
    assert {"tokens_per_second", "memory_bytes", "rss_bytes", "data_seconds", "disk_free_bytes"} <= view[
        "traces"
    ].keys()
    assert "memory 0 B waited for data 0.0% of the step" in words(live.ask("/runs/bard").text)


def test_an_attempt_is_explained(live: LiveServer) -> None:
    shown = words(live.ask("/runs/bard/attempts/1").text)
    assert "was preempted at step 22 of 40" in shown and "set out from the beginning" in shown
    assert live.ask("/runs/bard/attempts/9").status == 404


def test_the_curve_has_attempts_reasons_and_what_was_trained_again(live: LiveServer) -> None:
    (view,) = curves(live, "bard")
    assert view["traces"]["train_loss"]["steps"] == list(range(1, 34))
    assert [(end["reason"], end["trace"]["steps"]) for end in view["ends"]] == [("preempted", [22])]
    assert view["replays"] == [{"first_step": 21, "last_step": 22}]
    assert view["traces"]["val_loss"]["steps"] == [10, 20]


def test_a_fork_shows_the_branch_that_it_grew_from(
    changing: LiveServer, bard: FabricatedRun, store: LocalStore
) -> None:
    origin = ForkOrigin(run_id="bard", checkpoint=bard.log.state.checkpoints[1].committed.reference, state_sha256="s")
    RunLog(store, "branch").append(
        lambda _: opened("branch", config=configuration().frozen(), forked_from=origin), writer=writer()
    )
    (view,) = curves(changing, "branch")
    assert view["ancestors"] == ["bard"] and view["traces"]["inherited"]["steps"] == list(range(1, 21))
    assert '/compare?run=bard&amp;run=branch"' in changing.ask("/runs/branch").text


def test_what_a_run_adds_is_shown_at_the_next_look_and_an_unchanged_page_is_not_sent_again(
    changing: LiveServer, bard: FabricatedRun
) -> None:
    first = changing.ask("/runs/bard")
    assert changing.ask("/runs/bard", If_None_Match=first.headers["etag"]).status == 304
    write_steps(bard.log, 2, range(34, 37), **FALLING)
    bard.beat(36)
    second = changing.ask("/runs/bard", If_None_Match=first.headers["etag"])
    assert second.status == 200 and "step 36 of 40" in words(second.text)
    assert curves(changing, "bard")[0]["traces"]["train_loss"]["steps"][-1] == 36


def test_a_store_is_not_read_again_before_a_second_has_passed(changing: LiveServer, bard: FabricatedRun) -> None:
    first = changing.ask("/runs/bard")
    bard.beat(35)
    assert changing.ask("/runs/bard", wait=0.5).text == first.text
    assert changing.ask("/runs/bard", wait=0.6).text != first.text


def test_runs_are_compared_with_the_settings_that_differ_and_no_others(changing: LiveServer, store: LocalStore) -> None:
    other = fabricate(store, "other")
    other.start(overrides=("training.lr=0.25",))
    page = changing.ask("/compare?run=bard&run=other&run=gone")
    compared = words(page.text.partition('id="runs"')[2])
    assert "at step training.lr" in compared and "other – – 0.25 – running" in compared, "one key differs"
    assert "no run &#39;gone&#39;" in page.text
    assert [view["run_id"] for view in curves(changing, "bard", "other")] == ["bard", "other"]


def test_the_name_of_a_set_compares_its_runs_and_each_of_them_links_to_it(
    changing: LiveServer, store: LocalStore
) -> None:
    for value in ("0.25", "0.5"):
        fabricate(store, f"rates.lr={value}").start(overrides=(f"training.lr={value}",))
    compared = words(changing.ask("/compare?run=rates").text.partition('id="runs"')[2])
    assert "rates.lr=0.25 0.25 running" in compared and "rates.lr=0.5 0.5 running" in compared
    assert [view["run_id"] for view in curves(changing, "rates")] == ["rates.lr=0.25", "rates.lr=0.5"]
    assert '<a href="/compare?run=rates">' in changing.ask("/runs/rates.lr=0.25").text


def test_models_are_shown_with_what_was_decided(live: LiveServer) -> None:
    shown = words(live.ask("/models").text)
    assert "champion bard @20 held-out loss 2 " in shown and "promoted bard @10" in shown


def test_a_store_that_goes_away_is_told_with_what_was_last_read_and_comes_back(
    changing: LiveServer, store: LocalStore, tmp_path: Path
) -> None:
    pages = ("/", "/runs/bard", "/models", "/compare?run=bard")
    for path in pages:
        assert "cannot be read now" not in changing.ask(path).text
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for path in pages:
        away = changing.ask(path)
        assert away.status == 200 and "cannot be read now" in away.text and "bard" in words(away.text)
    assert changing.ask("/runs/another").status == 503
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    for path in pages:
        assert "cannot be read now" not in changing.ask(path).text


def test_a_store_that_was_never_made_and_a_run_that_is_not_there_are_told(live: LiveServer, tmp_path: Path) -> None:
    missing = live.ask("/runs/brad")
    assert missing.status == 404 and "did you mean bard" in missing.text
    assert "cannot be read now" not in missing.text, "the store was read: it has no such run"
    with served(LocalStore(tmp_path / "nowhere"), tmp_path / "work") as empty:
        page = empty.ask("/")
        assert page.status == 503 and "there is no such folder" in page.text


def test_every_file_that_a_page_names_is_served_from_the_installation(live: LiveServer) -> None:
    text = live.ask("/runs/bard").text + live.ask("/compare?run=bard").text
    for path in sorted(set(re.findall(r'(?:src|href)="(/assets/[^"]+)"', text))):
        answer = live.ask(path)
        assert answer.status == 200 and answer.text, path
    assert not re.search(r'(?:src|href)="(?!/|#)', text), "nothing from elsewhere"
    assert live.ask("/assets/..%2Fguard.py").status == 404


def test_every_page_has_a_language_a_title_headings_and_named_controls(live: LiveServer) -> None:
    for path in ("/", "/runs/bard", "/runs/bard/attempts/1", "/compare?run=bard", "/models"):
        text = live.ask(path).text
        assert '<html lang="en">' in text and re.search(r"<title>[^<]+ · Cairn</title>", text)
        assert text.count("<h1") == 1 and 'href="#content"' in text and "<main" in text
        controls = re.findall(r"<(?:input|select)[^>]*>", re.sub(r"<label>\w+ <(?:input|select)[^>]*>", "", text))
        unnamed = [
            item for item in controls if not re.search(r'aria-label|type="hidden"|id="q"|data-(?:axis|log|raw)', item)
        ]
        assert unnamed == [], path


def test_monitoring_is_answered_with_the_numbers_of_all_runs(live: LiveServer) -> None:
    answer = live.ask("/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert 'cairn_run_step{run="bard"} 33.0' in answer.text and answer.text.endswith("# EOF\n")
