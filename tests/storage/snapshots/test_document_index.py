from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots import snapshot_manifest
from cairn.storage.snapshots.parquet_process import read_parquet
from cairn.storage.snapshots.snapshot_manifest import (
    REJECTED_SCHEMA,
    SPLITS,
    DocumentPlace,
    DocumentRow,
    RejectedRow,
    RowWriter,
    SplitName,
    TokenSpan,
    documents_between,
)

pytestmark = pytest.mark.usefixtures("forked_parsers")


def row(number: int, *, split: str = "train") -> DocumentRow:
    return DocumentRow(
        source=f"{number % 3}.txt", offset_bytes=number * 10, bytes=9, tokens=number % 7 + 1, split=split, sha256="ab"
    )


ROWS = [row(number, split="val" if number % 5 == 4 else "train") for number in range(25)]


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.snapshots.snapshot_manifest.ROW_GROUP_ROWS", 4)


def write(path: Path, rows: Iterable[DocumentRow] = ROWS) -> Path:
    with RowWriter(path) as index:
        for item in rows:
            index.extend([astuple(item)])
    return path


def test_rows_come_back_in_the_order_they_were_appended(tmp_path: Path) -> None:
    read = parquet.read_table(write(tmp_path / "index")).to_pylist()
    assert [DocumentRow(**fields) for fields in read] == ROWS


def test_no_more_than_one_row_group_is_held(tmp_path: Path) -> None:
    assert parquet.ParquetFile(write(tmp_path / "index")).metadata.num_row_groups == 7


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "one").read_bytes() == write(tmp_path / "two").read_bytes()


@pytest.mark.parametrize("at_once", [2, 3, 4, 9, 25])
def test_rows_added_many_at_once_give_the_same_bytes(tmp_path: Path, at_once: int) -> None:
    rows = [astuple(item) for item in ROWS]
    with RowWriter(tmp_path / "many") as index:
        for first in range(0, len(rows), at_once):
            index.extend(rows[first : first + at_once])
    assert (tmp_path / "many").read_bytes() == write(tmp_path / "one by one").read_bytes()


def test_an_index_without_rows_is_readable(tmp_path: Path) -> None:
    assert parquet.read_table(write(tmp_path / "index", [])).num_rows == 0


def test_a_split_that_is_neither_train_nor_val_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split = 'test': must be one of train, val"):
        write(tmp_path / "index", [row(1, split="test")])


def test_what_was_left_out_is_listed_with_its_place_and_fault(tmp_path: Path) -> None:
    left_out = [RejectedRow(source="a", offset_bytes=n, kind="not UTF-8", detail="byte 0xff") for n in range(9)]
    with RowWriter(tmp_path / "rejected", REJECTED_SCHEMA) as rejected:
        for item in left_out:
            rejected.extend([astuple(item)])
    read = parquet.read_table(tmp_path / "rejected").to_pylist()
    assert [RejectedRow(**fields) for fields in read] == left_out


def places(split: str) -> list[DocumentPlace]:
    """Where every document of a split begins, counted the slow way."""
    found, position = [], 0
    for item in ROWS:
        if item.split == split:
            found.append(DocumentPlace(row=item, first_token=position))
            position += item.tokens
    return found


def between(path: Path, split: SplitName, start: int, stop: int) -> list[DocumentPlace]:
    (found,) = documents_between(path, [TokenSpan(split=split, start=start, stop=stop)])
    return list(found)


def test_many_ranges_of_both_splits_are_found_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = write(tmp_path / "index"), []
    monkeypatch.setattr(snapshot_manifest, "read_parquet", lambda *a, **k: calls.append(k) or read_parquet(*a, **k))
    wanted = [place for split in SPLITS for place in (places(split)[0], places(split)[-1])]
    spans = [
        TokenSpan(split=place.row.split, start=place.first_token, stop=place.first_token + 1)  # type: ignore[arg-type]
        for place in reversed(wanted)
    ]
    assert documents_between(path, spans) == tuple((place,) for place in reversed(wanted)) and len(calls) == 1
    assert len(calls[0]["groups"]) < parquet.ParquetFile(path).num_row_groups, "those between them are not read"


def test_the_first_and_the_last_token_lead_back_to_their_document(tmp_path: Path) -> None:
    asked = [
        (place, TokenSpan(split=split, start=token, stop=token + 1))
        for split in SPLITS
        for place in places(split)[1::7]
        for token in (place.first_token, place.first_token + place.row.tokens - 1)
    ]
    found = documents_between(write(tmp_path / "index"), [span for _, span in asked])
    assert found == tuple((place,) for place, _ in asked)


@pytest.mark.parametrize("split", SPLITS)
def test_a_range_of_tokens_leads_back_to_all_its_documents(tmp_path: Path, split: SplitName) -> None:
    path, all_places = write(tmp_path / "index"), places(split)
    middle = all_places[1:-1]
    end = middle[-1].first_token + middle[-1].row.tokens
    spans = [
        TokenSpan(split=split, start=start, stop=stop) for start, stop in ((0, 10**9), (middle[0].first_token, end))
    ]
    assert documents_between(path, spans) == (tuple(all_places), tuple(middle))


def test_tokens_beyond_the_end_belong_to_no_document(tmp_path: Path) -> None:
    assert between(write(tmp_path / "index"), "val", 10**6, 10**6 + 1) == []


def test_only_the_row_groups_that_hold_the_tokens_are_read(tmp_path: Path) -> None:
    path, last = write(tmp_path / "index"), places("train")[-2]
    begin = parquet.ParquetFile(path).metadata.row_group(5).column(0).dictionary_page_offset
    with path.open("r+b") as damaged:
        damaged.seek(4)
        damaged.write(bytes(begin - 4))  # the five row groups before it
    assert between(path, "train", last.first_token, last.first_token + 1) == [last]


def test_another_file_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"PAR1")
    with pytest.raises(IntegrityError, match="index: not a readable document index"):
        between(tmp_path / "index", "train", 0, 1)
