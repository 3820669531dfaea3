"""The last words of a process that had very many: only the last are read."""

from pathlib import Path

from cairn.tasks.trainer.trainer_process import tail_of


def test_of_gigabytes_of_complaints_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(b"\nlast but one\nlast \xff words\n")
    assert tail_of(path, lines=2) == ("last but one", "last \N{REPLACEMENT CHARACTER} words")


def test_a_short_or_absent_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_bytes(b"one\ntwo\n")
    assert (tail_of(tmp_path / "stderr"), tail_of(tmp_path / "none")) == (("one", "two"), ())
