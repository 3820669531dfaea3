from cairn.tasks.text.format import describe_split


def test_a_share_near_the_one_asked_for_is_told_without_a_warning() -> None:
    assert describe_split(9_000, 1_100, "tokens", 0.1) == "9,000 tokens to train on, 1,100 held out"


def test_a_text_that_fell_into_val_as_a_whole_is_warned_of() -> None:
    told = describe_split(1_400_000, 14_900_000, "tokens", 0.1)
    assert "warning: that is 91.4%, not data.val_fraction = 0.1" in told and "data.split = 'end'" in told


def test_far_too_little_held_out_is_warned_of_too() -> None:
    assert "warning: that is 1.0%" in describe_split(9_900, 100, "bytes", 0.1)
