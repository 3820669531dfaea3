"""Losses by window beside the log: what is read is what was written, or it is refused by name."""

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.window_losses import WindowLosses, losses_folder, read_losses, write_losses
from tests.memory_store import MemoryStore

RUN = "runs/bard"
LOSSES = WindowLosses(window_tokens=128, losses={"val_loss": tuple(3.0 + index / 7 for index in range(320))})


def test_losses_are_read_as_they_were_written_to_a_hundred_thousandth_of_a_nat() -> None:
    store = MemoryStore("test")
    read = read_losses(store, RUN, write_losses(store, RUN, LOSSES))
    assert read.window_tokens == 128
    assert read.losses["val_loss"] == pytest.approx(LOSSES.losses["val_loss"], abs=5e-6)


def test_a_default_slice_takes_less_than_three_thousand_bytes() -> None:
    store = MemoryStore("test")
    write_losses(store, RUN, LOSSES)
    (key,) = store.keys(losses_folder(RUN))
    assert len(store.read(key)) < 3000


@pytest.mark.parametrize(
    ("data", "problem"), [(b"{}", "its evaluation names"), (None, "is missing")], ids=["other bytes", "no object"]
)
def test_an_object_that_is_not_what_the_log_names_is_refused_by_its_key(data: bytes | None, problem: str) -> None:
    store = MemoryStore("test")
    digest = write_losses(store, RUN, LOSSES)
    key = f"{losses_folder(RUN)}/{digest}.json"
    store.write(key, data) if data is not None else store.delete_all([key])
    with pytest.raises(IntegrityError, match=f"{key}.*{problem}"):
        read_losses(store, RUN, digest)


@pytest.mark.parametrize("digest", ["../../other", "A" * 64, "0" * 63, ""])
def test_a_log_names_no_other_object(digest: str) -> None:
    with pytest.raises(IntegrityError, match="must be 64 hexadecimal digits"):
        read_losses(MemoryStore("test"), RUN, digest)
