import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Cairn, Ended
from tests.fabricated_run import FabricatedRun

OFFERS = """
[per_device_day]
lost = 0.001
[offers.spot]
price_per_device_hour = 1.25
currency = "EUR"
replacement_seconds = 1800
per_device_day = { preempted = 0.3 }
[offers.on-demand]
price_per_device_hour = 4
per_device_day = {}
"""
SHORT = ("--days", "0.5", "--devices", "1024")
CONFIG = """
[data]
sources = ["text.txt"]
[training]
steps = 100
[checkpoint]
every_steps = 77
[budgets.lost]
retries = 0
"""


def document(ended: Ended) -> Any:
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_the_answer_comes_first_and_all_fits_one_screen(cairn: Cairn) -> None:
    ended = cairn("simulate", "--days", "15")
    lines = ended.out.splitlines()
    assert lines[0].startswith("budgets: finishes after ") and lines[1].startswith("3 retries: gives up after")
    assert len(lines) <= 24 and ended.err == ""


def test_no_store_is_opened_where_no_run_is_named(cairn: Cairn, tmp_path: Path) -> None:
    cairn("simulate", *SHORT)
    assert not (tmp_path / "store").exists()


def test_budgets_are_compared_with_flat_retries_and_the_interval_with_others(cairn: Cairn) -> None:
    view = document(cairn("simulate", *SHORT, "--json"))
    assert [outcome["policy"] for outcome in view["outcomes"]] == ["budgets", "3 retries", "10 retries"]
    assert view["intervals"].keys() == {"present", "young", "daly", "simulated"}


def test_equal_seeds_print_equal_documents_and_others_do_not(cairn: Cairn) -> None:
    first, again, other = (cairn("simulate", *SHORT, "--json", "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again and first != other


def test_the_median_seed_lies_within_the_interval_of_all_seeds(cairn: Cairn) -> None:
    first = document(cairn("simulate", *SHORT, "--json", "--seeds", "20"))["outcomes"][0]
    assert first["seeds"] == 20 and first["goodput"]["low"] <= first["goodput"]["value"]
    assert first["goodput"]["value"] <= first["goodput"]["high"] > first["goodput"]["low"]


def test_one_seed_is_its_own_interval(cairn: Cairn) -> None:
    ended = cairn("simulate", *SHORT, "--seeds", "1", "--seed", "3")
    assert ended.code == 0 and "seed 3;" in ended.out


def test_a_wait_for_another_machine_lengthens_the_run(cairn: Cairn) -> None:
    waits = [
        document(cairn("simulate", "--days", "3", "--json", "--replacement-seconds", seconds))["outcomes"][0]
        for seconds in ("0", "3600")
    ]
    assert waits[0]["hours"]["waiting"] < 1 < waits[1]["hours"]["waiting"]
    assert waits[0]["days"]["value"] < waits[1]["days"]["value"]


def test_times_and_sizes_are_taken_from_the_options(cairn: Cairn) -> None:
    options = ("--step-seconds", "3", "--checkpoint-seconds", "1", "--restart-seconds", "60")
    plan = document(cairn("simulate", *SHORT, *options, "--json"))["plan"]
    told = (plan["total_steps"], plan["devices"], plan["checkpoint_seconds"], plan["restart_seconds"])
    assert told == (14_400, 1024, 1.0, 60.0)


def test_budgets_and_interval_come_from_the_configuration(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG, encoding="utf-8")
    view = document(cairn("simulate", "--config", "run.toml", "--days", "10", "--json"))
    assert view["plan"]["every_steps"] == 77
    assert view["outcomes"][0]["stopped_by"].startswith("lost: budget lost is spent (retries)")


def test_rates_come_from_a_file(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text('source = "ours"\n[per_device_day]\nerror = 1.0\n', encoding="utf-8")
    view = document(cairn("simulate", "--trace", "rates.toml", "--days", "0.5", "--devices", "32", "--json"))
    assert (view["trace"]["source"], view["trace"]["per_device_day"]) == ("ours", {"error": 1.0})
    assert (view["outcomes"][0]["finished_seeds"], view["outcomes"][0]["attempts"]) == (0, 1)


def test_machines_of_a_price_are_compared_the_cheapest_run_first(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "offers.toml").write_text(OFFERS)
    asked = ("--trace", "offers.toml", "--days", "2", "--devices", "8")
    offers = document(cairn("simulate", *asked, "--json"))["offers"]
    steady = offers["on-demand"]
    assert steady["money"]["value"] == pytest.approx(4 * 8 * 24 * steady["days"]["value"])
    assert offers["spot"]["days"]["value"] > steady["days"]["value"]
    shown = cairn("simulate", *asked).out
    assert shown.index("\nspot ") < shown.index("\non-demand ") and " EUR" in shown


def test_a_wait_for_a_machine_costs_time_and_no_money(cairn: Cairn, tmp_path: Path) -> None:
    costs = []
    for wait in (0, 36000):
        (tmp_path / "offers.toml").write_text(
            f"price_per_device_hour = 1\nreplacement_seconds = {wait}\nper_device_day = {{ preempted = 0.5 }}\n"
        )
        found = document(
            cairn("simulate", "--trace", "offers.toml", "--days", "1", "--devices", "4", "--seeds", "1", "--json")
        )
        costs.append((found["offers"][""]["money"]["value"], found["offers"][""]["days"]["value"]))
    (cheap, short), (waited, long) = costs
    assert long > short + 0.1 and waited < 1.2 * cheap


def test_a_stored_run_is_replayed_with_its_own_times_and_policy(bard: FabricatedRun, cairn: Cairn) -> None:
    view = document(cairn("simulate", "bard", "--json"))
    plan = view["plan"]
    assert (view["run_id"], len(view["trace"]["recorded"]), plan["total_steps"], plan["devices"]) == ("bard", 1, 40, 1)
    assert plan["step_seconds"] == pytest.approx((2.0 + 3.0) / 30), "CPUs are one device"
    assert view["trace"]["per_device_day"].keys() == {"preempted"}
    assert view["outcomes"][0]["stopped_by"] is None


def test_people_see_a_stored_run_replayed(bard: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("simulate", "bard")
    assert (ended.code, ended.err) == (0, "") and "run bard: 1 failures" in ended.out


def test_a_run_that_committed_nothing_needs_a_step_time(fresh: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("simulate", "fresh")
    assert ended.code == 2 and "--step-seconds" in ended.err


def test_a_run_that_never_failed_finishes_under_every_policy(fresh: FabricatedRun, cairn: Cairn) -> None:
    view = document(cairn("simulate", "fresh", "--step-seconds", "1", "--json"))
    assert [outcome["stopped_by"] for outcome in view["outcomes"]] == [None] * 3
    assert view["intervals"].keys() == {"present"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("--devices", "0"), "--devices 0: must be a number of at least 1"),
        (("--replacement-seconds", "-1"), "--replacement-seconds -1.0: must be a number of at least 0"),
        (("--restart-seconds", "nan"), "--restart-seconds nan: must be a finite number"),
        (("--days", "1e300"), "--days 1e+300, --step-seconds 6.0: must be above 0, < 1e12 steps"),
        (("--trace", "nowhere.toml"), "nowhere.toml: cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_simulated_is_refused_as_usage(cairn: Cairn, arguments: tuple[str, ...], told: str) -> None:
    ended = cairn("simulate", *arguments)
    assert ended.code == 2 and told in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "rates.toml: per_device_day: missing; `cairn simulate --help` shows the keys of a trace"),
        ("per_device_day = 3", "per_device_day = 3: must be a table"),
        ("per_device_day = { lost = 'x' }", "per_device_day.lost = 'x': must be a number"),
        ("per_device_day = { lost = -1 }", "per_device_day.lost = -1: must be a number of at least 0"),
        ("per_device_day = { lost = 1e308 }", "per_device_day.lost = 1e+308: must be a number of at most 1e+09"),
        ("per_device_day = { lots = 1 }", "per_device_day.lots = 'lots': must be one of preempted, lost, oom, "),
        ("per_device_day = { completed = 1 }", "completed is no failure, but another way to end"),
        ("per_device_day = {}\nrate = 1", "rate = 1: unknown key; leave it out"),
        ("per_device_day = {}\naftershocks = { share = 1 }", "aftershocks.share = 1: must be a number below 1"),
        ("per_device_day = {}\nsource = 3", "source = 3: must be a text"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_refused_in_our_own_words(
    cairn: Cairn, tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "rates.toml").write_text(text)
    ended = cairn("simulate", "--trace", "rates.toml")
    assert ended.code == 2 and told in ended.err and "Input should" not in ended.err
