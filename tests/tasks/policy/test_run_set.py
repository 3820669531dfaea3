import pytest

from cairn.tasks.configuration.configuration_source import SetMember, expand_set
from cairn.tasks.errors import InvalidConfiguration


def names(*overrides: str) -> list[str]:
    return [member.run_id for member in expand_set("rates", overrides)]


def test_two_values_are_two_runs_named_after_them() -> None:
    assert expand_set("rates", ["training.lr=1e-3,3e-4"]) == (
        SetMember(run_id="rates.lr=0.001", overrides=("training.lr=0.001",)),
        SetMember(run_id="rates.lr=0.0003", overrides=("training.lr=0.0003",)),
    )


def test_several_keys_are_all_their_combinations() -> None:
    assert names("training.lr=1,2", "model.n_layer=3,4") == [
        *("rates.lr=1.n_layer=3", "rates.lr=1.n_layer=4", "rates.lr=2.n_layer=3", "rates.lr=2.n_layer=4")
    ]


def test_a_key_with_one_value_is_set_in_every_run_and_named_in_none() -> None:
    members = expand_set("rates", ["training.steps=9", "training.lr=1,2"])
    assert [(member.run_id, member.overrides[0]) for member in members] == [
        *(("rates.lr=1", "training.steps=9"), ("rates.lr=2", "training.steps=9"))
    ]


@pytest.mark.parametrize(
    "override",
    [
        *("training.betas=[0.9, 0.95]", 'data.sources=["a.txt", "b.txt"]', "evaluation.command=lm-eval --tasks a,b"),
        *("data.sources=a.txt,b.txt", "training.lr=1e-3", "training.lr=1e-3,", "training.lr=1e-3,fast", "training.lr="),
    ],
)
def test_one_list_and_text_without_quotes_are_one_value(override: str) -> None:
    assert expand_set("rates", [override]) == (SetMember(run_id="rates", overrides=(override,)),)


def test_two_lists_are_two_runs() -> None:
    assert names("training.betas=[0.9,0.95],[0.9,0.99]") == ["rates.betas=0.9_0.95", "rates.betas=0.9_0.99"]


def test_texts_in_quotes_are_two_runs() -> None:
    assert names('model.norm="layer","rms"') == ["rates.norm=layer", "rates.norm=rms"]


def test_keys_of_one_name_are_named_with_their_sections() -> None:
    assert names("training.seed=1,2", "evaluation.seed=3,4")[0] == "rates.training.seed=1.evaluation.seed=3"


@pytest.mark.parametrize("override", ["training.lr=1,1", 'model.norm="a b","a/b"'])
def test_two_runs_of_one_name_are_refused(override: str) -> None:
    with pytest.raises(InvalidConfiguration, match="two runs would be named rates"):
        expand_set("rates", [override])


def test_more_runs_than_anybody_wants_are_refused() -> None:
    thirty = ",".join(map(str, range(30)))
    with pytest.raises(InvalidConfiguration, match="more than 200 runs"):
        expand_set("rates", [f"training.seed={thirty}", f"model.n_layer={thirty}"])
