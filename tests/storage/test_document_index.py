from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from storage.document_index import DocumentIndexWriter, DocumentRow, RejectedRow, RejectedWriter


def row(number: int, *, split: str = "train") -> DocumentRow:
    return DocumentRow(
        source=f"{number % 3}.txt", offset_bytes=number * 10, bytes=9, tokens=number % 7 + 1, split=split, sha256="ab"
    )


ROWS = [row(number, split="val" if number % 5 == 4 else "train") for number in range(25)]


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.document_index.ROW_GROUP_ROWS", 4)


def write(path: Path, rows: Iterable[DocumentRow] = ROWS) -> Path:
    with DocumentIndexWriter(path) as index:
        for item in rows:
            index.append(item)
    return path


def test_rows_come_back_in_the_order_they_were_appended(tmp_path: Path) -> None:
    read = parquet.read_table(write(tmp_path / "index")).to_pylist()
    assert [DocumentRow(**fields) for fields in read] == ROWS


def test_no_more_than_one_row_group_is_held(tmp_path: Path) -> None:
    assert parquet.ParquetFile(write(tmp_path / "index")).metadata.num_row_groups == 7


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "one").read_bytes() == write(tmp_path / "two").read_bytes()


def test_an_index_without_rows_is_readable(tmp_path: Path) -> None:
    assert parquet.read_table(write(tmp_path / "index", [])).num_rows == 0


def test_a_split_that_is_neither_train_nor_val_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split = 'test': must be one of train, val"):
        write(tmp_path / "index", [row(1, split="test")])


def test_what_was_left_out_is_listed_with_its_place_and_fault(tmp_path: Path) -> None:
    left_out = [RejectedRow(source="a", offset_bytes=n, kind="not UTF-8", detail="byte 0xff") for n in range(9)]
    with RejectedWriter(tmp_path / "rejected") as rejected:
        for item in left_out:
            rejected.append(item)
    read = parquet.read_table(tmp_path / "rejected").to_pylist()
    assert [RejectedRow(**fields) for fields in read] == left_out
