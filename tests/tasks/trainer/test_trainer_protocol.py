"""Every message of the trainer protocol survives encoding; any other line is a `TaskError`."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.failures import ErrorKind, ExceptionReport
from cairn.tasks.trainer.trainer_protocol import (
    Command,
    Event,
    Finish,
    Ready,
    SegmentDone,
    StepDone,
    TrainUntil,
    Waiting,
    decode_message,
    encode_message,
)
from tests.entries import step_record

RECORD = step_record(1, 1, sample="\x1b[")
MESSAGES: list[Command | Event] = [
    TrainUntil(step=5),
    Finish(),
    Ready(step=0, state_sha256=None, parameters=7, device="cpu"),
    StepDone(record=RECORD, tokens=8, gpu_seconds=0.1),
    SegmentDone(step=5, stopped=False, tokens=40, gpu_seconds=0.5),
    SegmentDone(step=9, stopped=False, tokens=40, gpu_seconds=0.5, behind=5),
    TrainUntil(step=9, stall_seconds=2.5),
    StagedCheckpoint(step=5, attempt=1, prefix="p", manifest_sha256="m", state_sha256="s", bytes=9),
    Waiting(step=5, why="503", seconds=1.0),
    ExceptionReport(kind=ErrorKind.BAD_DATA, exception="E", message="m", traceback=("t",), step=4, windows=(1, 2)),
]
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([2**63, 2**64, 10**400])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def survives(line: bytes) -> None:
    try:
        message = decode_message(line)
    except TaskError as error:
        assert "not a message" in str(error) and len(str(error)) < 2_000
        return
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_one_line_and_comes_back_as_it_was(message: Command | Event) -> None:
    line = encode_message(message)
    assert (line.count(b"\n"), line[-1:], decode_message(line)) == (1, b"\n", message)


@settings(max_examples=100)
@given(st.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_library_prints_is_no_surprise(line: bytes) -> None:
    survives(line)


@settings(max_examples=200)
@given(st.sampled_from(MESSAGES), st.data(), JSON)
def test_a_message_with_another_value_anywhere_is_no_surprise(
    message: Command | Event, data: st.DataObject, value: object
) -> None:
    document = json.loads(encode_message(message))
    holder = data.draw(st.sampled_from([document, document[1]]))
    if holder:
        places = range(len(document)) if holder is document else sorted(holder)
        holder[data.draw(st.sampled_from(places))] = value
    survives(json.dumps(document).encode())


@pytest.mark.parametrize(
    "line",
    [b"", b"[" * 1_000_000, b'["Finish",' + b"[" * 500_000, b'["Finish",{},' + b"[" * 500_000],
    ids=["nothing", "deep", "deep-content", "deep-beside"],
)
def test_a_line_that_breaks_parsers_is_no_surprise(line: bytes) -> None:
    with pytest.raises(TaskError, match="not a message"):
        decode_message(line)
