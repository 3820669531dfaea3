import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.tasks.data.document import InvalidCorpus
from tests.s3.servers import BUCKET, S3Server, aws_environment
from tests.tasks.corpus_files import open_sources, packed, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")
TEXTS = [f"Document {number}." for number in range(10)]


@pytest.fixture(scope="module")
def bucket(server: S3Server) -> Iterator[str]:
    import s3fs

    folder = f"{BUCKET}/{uuid.uuid4().hex}"
    with aws_environment(server.environment()):
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        for number, name in enumerate(("jsonl.zst", "jsonl.gz", "parquet", "txt")):
            shape, _, compression = name.partition(".")
            plain = "\n\n".join(TEXTS).encode() if shape == "txt" else shaped(TEXTS, shape)
            content = packed(plain, f".{compression}" if compression else "")
            files.pipe_file(f"{folder}/in/{number}/a.{name}", content)
        yield f"s3://{folder}"


def texts_of(source: str) -> list[str]:
    return [item.text for opened in open_sources([source], Path()) for item in opened.documents()]


def test_a_glob_reaches_into_a_bucket(bucket: str) -> None:
    assert texts_of(f"{bucket}/**/*.jsonl.zst") == texts_of(f"{bucket}/**/*.gz") == TEXTS


def test_a_table_in_a_bucket_is_read(bucket: str) -> None:
    assert texts_of(f"{bucket}/in/2/a.parquet") == TEXTS


def test_all_kinds_of_files_of_a_bucket_are_one_corpus(bucket: str) -> None:
    opened = open_sources([f"{bucket}/**"], Path())
    assert [source.name.rpartition("/")[2] for source in opened] == ["a.jsonl.zst", "a.jsonl.gz", "a.parquet", "a.txt"]
    assert [len(list(source.documents())) for source in opened] == [10, 10, 10, 2]


def test_an_object_that_is_not_there_is_refused(bucket: str) -> None:
    with pytest.raises(InvalidCorpus, match="no such object"):
        open_sources([f"{bucket}/absent.txt"], Path())
    with pytest.raises(InvalidCorpus, match="the glob matches no file"):
        open_sources([f"{bucket}/**/*.absent"], Path())


def test_a_prefix_is_refused_with_the_glob_to_write_instead(bucket: str) -> None:
    with pytest.raises(InvalidCorpus, match=r"is a directory; .*\*\*/\*\.txt"):
        open_sources([f"{bucket}/in"], Path())
