"""From a URL to a store."""

import os
from pathlib import Path

import pytest

from cairn.storage.errors import StorageError
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.s3_store import S3Store


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/prefix",
        "gs://u:secret@bucket",
        "az://u:secret@container",
        "s3://key@bucket",
        "https://:secret@host/x",
        "memory://u:p@x",
    ],
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


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("rest", ["", "/prefix", "bucket/x?secret=1", "bucket/x#1"])
def test_a_url_of_a_bucket_must_be_a_bucket_and_a_prefix_alone(scheme: str, rest: str) -> None:
    with pytest.raises(StorageError, match=f"must be {scheme}://BUCKET or {scheme}://BUCKET/PREFIX") as refused:
        open_store(f"{scheme}://{rest}")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket/a/b", "s3://bucket"])
def test_a_remote_store_is_patient_and_says_where_it_is(url: str) -> None:
    store = open_store(url + "/")
    assert isinstance(store, S3Store)
    assert store.url == url


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("gs:/bucket/of:/x", "gs://bucket/of:/x"),
        ("file:/data/x", "file:///data/x"),
    ],
)
def test_an_address_with_one_slash_is_refused_with_the_one_that_is_meant(url: str, meant: str) -> None:
    with pytest.raises(StorageError, match=rf"did you mean {meant}\? For a folder of that name: \./{url}$"):
        open_store(url)


@pytest.mark.parametrize("name", ["a b", "a#b", "a?b", "a%20b", "a::b", "ä", "[a]*", "a@b:c", "~nobody"])
def test_a_folder_of_any_name_is_found_again_by_its_path_and_by_its_url(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(f"./{name}")
    store.write("x", b"1")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert open_store(store.url).read("x") == open_store(f"{tmp_path}/{name}").read("x") == b"1"


@pytest.mark.parametrize("url", ["file://store", "file://~/store", "file:///a?b", "file:///a#b"])
def test_a_file_url_that_means_no_whole_path_is_refused(url: str) -> None:
    with pytest.raises(
        StorageError, match=r"must be file:///PATH, a whole path with %23 for # and %3F for \?; or write"
    ):
        open_store(url)


@pytest.mark.parametrize("name", [b"a\xff", b"a\nb"])
def test_a_folder_whose_name_no_log_could_hold_is_refused(tmp_path: Path, name: bytes) -> None:
    with pytest.raises(StorageError, match="must be UTF-8 without control characters; rename the folder"):
        open_store(str(tmp_path / os.fsdecode(name)))


def test_an_address_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(StorageError, match="store URL is no address"):
        open_store("s3://[bucket")


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
    rule = r"choose another --store: a folder, file://FOLDER, s3://BUCKET/PREFIX, gs://"
    with pytest.raises(StorageError, match=f"^store {url.split(':')[0]}://: .*{rule}"):
        open_store(url)


@pytest.mark.parametrize("scheme", ["abfs", "abfss", "adl", "wasb", "wasbs"])
def test_an_azure_address_that_holds_the_account_is_refused_with_the_one_that_is_meant(scheme: str) -> None:
    with pytest.raises(StorageError, match="AZURE_STORAGE_ACCOUNT_NAME: write az://CONTAINER/PREFIX"):
        open_store(f"{scheme}://container@account.dfs.core.windows.net/x")


@pytest.mark.parametrize(("scheme", "shown"), [("gs", "gs"), ("gcs", "gs"), ("az", "az"), ("azure", "az")])
def test_a_cloud_is_opened_by_each_of_its_names_and_shown_by_one(
    scheme: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_store(f"{scheme}://bucket/a/b/").url == f"{shown}://bucket/a/b"


def test_without_an_account_azure_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/x")


def test_without_its_library_a_cloud_is_refused_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.stores.cloud_store.find_spec", lambda name: None)
    with pytest.raises(StorageError, match="the extra 'clouds' of cairn-train"):
        open_store("gs://bucket/x")
