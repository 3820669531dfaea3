"""Amounts are shown by one function, so that no text says `6.28e+03 GB` or `0.1041 TFLOP/s`."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from cairn.tasks.text.format import format_quantity

SCALED = re.compile(r"\{[^{}]* / (?:1e\d+|_?[A-Z]+BYTES?)[^{}]*\}|\}\s?[kMGT](?:B|FLOP)\b|rich\.filesize")


def test_no_message_scales_an_amount_itself(root: Path, modules: Mapping[str, object]) -> None:
    texts = {path: SCALED.findall((root / path).read_text(encoding="utf-8")) for path in modules}
    assert {path: found for path, found in texts.items() if found} == {}


@pytest.mark.parametrize(
    ("amount", "unit", "shown"),
    [
        (0, "B", "0 B"),
        (11, "B", "11 B"),
        (999, "B", "999 B"),
        (1_000, "B", "1 kB"),
        (4_340_000, "B", "4.34 MB"),
        (400_123_456, "B", "400 MB"),
        (999_999_999, "B", "1 GB"),
        (6.28e12, "B", "6.28 TB"),
        (2e22, "B", "20000 EB"),
        (1.041e11, "FLOP/s", "104 GFLOP/s"),
        (9.89e14, "FLOP/s", "989 TFLOP/s"),
        (0.5, "B/s", "0.5 B/s"),
    ],
)
def test_an_amount_has_three_digits_and_no_exponent(amount: float, unit: str, shown: str) -> None:
    assert format_quantity(amount, unit) == shown
