"""What a store's client says in an error is repeated without the credentials in it."""

import pytest

from cairn.storage.stores.s3_bucket import convert_error

SAID = [
    "cannot reach https://somebody:canary@host/bucket",
    "https://host/b/k?X-Amz-Algorithm=AWS4&X-Amz-Signature=canary&X-Amz-Expires=9",
    "https://host/b/k?X-Amz-Credential=canary%2F2026&versionId=1",
    "https://host/b/k?x-amz-security-token=canary",
    "'https://host/b/k?AWSAccessKeyId=canary&Signature=canary%3D&Expires=9'",
]


@pytest.mark.parametrize("said", SAID)
def test_an_error_of_a_store_repeats_no_credentials(said: str) -> None:
    shown = str(convert_error(OSError(said), action="read", where="s3://bucket/key"))
    assert "canary" not in shown and "host" in shown
