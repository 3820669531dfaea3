from typing import Any

from flows.preparation.preflight import TrainingRequest, wanted_configuration

BY_ID = TrainingRequest(config="", run_id="bard", overrides=())


def test_a_run_continued_by_its_id_keeps_the_settings_of_its_newest_attempt(fresh: Any) -> None:
    fresh.start(overrides=("checkpoint.every_steps=5", "budgets.lost.retries=2"))
    wanted = wanted_configuration(BY_ID, fresh.log.state, {})
    assert (wanted.checkpoint.every_steps, wanted.budgets.lost.retries) == (5, 2)


def test_overrides_lie_on_top_of_what_the_log_says(fresh: Any) -> None:
    fresh.start(overrides=("checkpoint.every_steps=5",))
    wanted = wanted_configuration(BY_ID, fresh.log.state, {"CAIRN_CHECKPOINT__EVERY_STEPS": "7"})
    assert wanted.checkpoint.every_steps == 7


def test_a_run_nobody_has_trained_yet_keeps_what_is_frozen(fresh: Any) -> None:
    assert wanted_configuration(BY_ID, fresh.log.state, {}).training.steps == 40
