"""From a URL to a store."""

from pathlib import Path

import pytest

from cairn.storage.errors import StorageError
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.s3_store import S3Store


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/prefix", "s3://key@bucket", "https://:secret@host/x", "memory://u:p@x"]
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(StorageError, match="credentials") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["simplecache::s3://key:secret@bucket", "filecache::file:///x"])
def test_a_chain_of_file_systems_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(StorageError, match="chain") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket/x?secret=1", "s3://bucket/x#1"])
def test_an_s3_url_must_be_a_bucket_and_a_prefix_alone(url: str) -> None:
    with pytest.raises(StorageError, match=r"must be s3://bucket or s3://bucket/prefix") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket/a/b", "s3://bucket"])
def test_a_remote_store_is_patient_and_says_where_it_is(url: str) -> None:
    store = open_store(url + "/")
    assert isinstance(store, S3Store)
    assert store.url == url


def test_an_empty_url_is_refused() -> None:
    with pytest.raises(StorageError, match="must be a folder or a URL"):
        open_store("")


def test_a_plain_path_and_a_file_url_are_the_same_folder(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a b")).write("x", b"1")
    assert open_store(f"file://{tmp_path}/a%20b").read("x") == b"1"
    assert isinstance(open_store(str(tmp_path)), LocalStore)


@pytest.mark.parametrize(
    "url", ["nothing-known://bucket/x", "s4://bucket", "ftp://host/x", "hdfs://host/x", "local:///x", "memory://x"]
)
def test_an_unknown_scheme_is_refused_with_those_that_are_known(url: str) -> None:
    rule = r"choose another --store: a folder, file://FOLDER or s3://BUCKET/PREFIX"
    with pytest.raises(StorageError, match=f"^store {url.split(':')[0]}://: .*{rule}"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("gs://bucket/x", "Google Cloud Storage"),
        ("az://container/x", "Azure Blob Storage"),
        ("abfs://container@account/x", "Azure Blob Storage"),
    ],
)
def test_a_cloud_whose_api_is_not_spoken_is_refused_with_what_is_known_of_it(url: str, name: str) -> None:
    with pytest.raises(
        StorageError, match=f"{name} is not supported, and an S3-compatible endpoint .* was never tried"
    ):
        open_store(url)
