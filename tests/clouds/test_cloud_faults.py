"""The clouds' client and a network that breaks: what was acknowledged is there once, what was not is not used."""

import hashlib
import os
from collections.abc import Iterator

import pytest

from cairn.storage.errors import IntegrityError, StoreFull, StoreRefused, StoreUnavailable, StoreUnsound
from cairn.storage.stores.cloud_store import CloudStore
from cairn.storage.stores.object_store import RetryPolicy, run_retry_policy, write_hashed
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.store_probe import probe_store
from tests.clouds.servers import CloudServer, cloud_environment
from tests.entries import evaluated, writer
from tests.s3.fault_proxy import FaultProxy, NetworkFault, at_every_place
from tests.storage.builders import LOG, check_invariants, claim, commit, open_run, stage
from tests.storage.store_operations import OPERATIONS

REFUSED, OWN = NetworkFault.REFUSED, (NetworkFault.QUOTA, NetworkFault.STORAGE_FULL, NetworkFault.EXPIRED)
BREAKS = [
    fault for fault in NetworkFault if fault not in (NetworkFault.STRIP, NetworkFault.LATE, NetworkFault.REFUSED, *OWN)
]
ENTRY = rf"PUT .*{LOG}/"
UPLOAD = {"part": r"PUT .*(partNumber=|comp=block&|blockid=)", "last": r"(POST .*uploadId|PUT .*comp=blocklist)"}


@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.name)
def test_an_append_whose_put_and_whose_reading_back_break_is_in_the_log_once(
    store: CloudStore, direct: CloudStore, proxy: FaultProxy, fault: NetworkFault
) -> None:
    log = open_run(store)
    log.refresh()
    aims = [proxy.aim(fault, ENTRY), proxy.aim(fault, rf"GET .*{LOG}/9999999998")]
    log.append(lambda state: evaluated(1, 1.0), writer=writer())
    assert aims[0].fired
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


def test_an_append_whose_answer_is_lost_is_one_put(store: CloudStore, direct: CloudStore, proxy: FaultProxy) -> None:
    log = open_run(store)
    proxy.requests.clear()
    proxy.aim(NetworkFault.RESPONSE_LOST, ENTRY)
    log.append(lambda state: evaluated(1, 1.0), writer=writer())
    assert sum(request.startswith("PUT ") for request in proxy.requests) == 1
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


def test_an_append_that_is_refused_is_one_request_and_is_made_once_it_is_allowed(
    store: CloudStore, direct: CloudStore, proxy: FaultProxy
) -> None:
    log = open_run(store)
    aim = proxy.aim(REFUSED, ENTRY, times=1000)
    with pytest.raises(StoreRefused, match=r"(allow|give) this account"):
        run_retry_policy(600.0).call(lambda: log.append(lambda state: evaluated(1, 1.0), writer=writer()))
    assert aim.seen == 1
    proxy.aims.clear()
    log.append(lambda state: evaluated(1, 1.0), writer=writer())
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


@pytest.mark.parametrize("fault", [NetworkFault.QUOTA, NetworkFault.STORAGE_FULL], ids=lambda fault: fault.name)
def test_a_full_store_is_called_full(store: CloudStore, proxy: FaultProxy, fault: NetworkFault) -> None:
    proxy.aim(fault, "PUT", times=1000)
    with pytest.raises(StoreFull, match="free space"):
        store.create("a/b", b"1")


@pytest.mark.parametrize("fault", [NetworkFault.SLOW_DOWN, NetworkFault.RESPONSE_LOST], ids=lambda fault: fault.name)
def test_a_commit_survives_a_break_of_any_of_its_requests(
    store: CloudStore, direct: CloudStore, proxy: FaultProxy, fault: NetworkFault
) -> None:
    log = open_run(store)
    attempt = claim(log)
    proxy.requests.clear()
    prefixes = {commit(log, stage(store, step=5, attempt=attempt)) and stage(direct, step=5, attempt=attempt).prefix}
    count = len(proxy.requests)
    for number in range(1, count + 1):
        aim = proxy.aim(fault, ".*", nth=number)
        staged = stage(store, step=10 + number, attempt=attempt)
        prefixes.add(staged.prefix)
        commit(log, staged)
        assert aim.fired
        proxy.aims.clear()
    state = check_invariants(direct, prefixes)
    assert (count >= 4, len(state.checkpoints)) == (True, 1 + count)


@pytest.mark.parametrize(("request_", "fault"), at_every_place(UPLOAD, BREAKS, whole="last"))
def test_a_stream_whose_request_breaks_is_whole_or_no_object(
    store: CloudStore, direct: CloudStore, proxy: FaultProxy, request_: str, fault: NetworkFault
) -> None:
    aim, data = proxy.aim(fault, request_), os.urandom(3 * 64 * 1024 + 5)
    try:
        write_hashed(store, "a/b", [data])
    except StoreUnavailable:
        assert direct.size("a/b") in (None, len(data))
    else:
        assert hashlib.sha256(direct.read("a/b")).digest() == hashlib.sha256(data).digest()
    assert aim.fired


@pytest.mark.parametrize("fault", [NetworkFault.SLOW_DOWN, NetworkFault.TORN_UP], ids=lambda fault: fault.name)
@pytest.mark.parametrize("request_", UPLOAD.values(), ids=UPLOAD)
def test_a_stream_that_never_gets_through_is_an_error_and_no_object(
    store: CloudStore, direct: CloudStore, proxy: FaultProxy, request_: str, fault: NetworkFault
) -> None:
    proxy.aim(fault, request_, times=1000)
    with pytest.raises(StoreUnavailable, match="cannot upload"):
        store.write_stream("a/b", [bytes(3 * 64 * 1024)])
    assert direct.keys("a") == []


@pytest.mark.parametrize("broke", [ValueError, KeyboardInterrupt, StoreUnavailable])
def test_a_stream_whose_source_breaks_leaves_no_object_and_raises_its_error(
    store: CloudStore, direct: CloudStore, broke: type[BaseException]
) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(3 * 64 * 1024)
        raise broke("mine")

    with pytest.raises(broke, match="mine"):
        store.write_stream("a/b", broken())
    assert direct.keys("a") == []


def test_a_chunk_may_be_reused_once_the_next_one_is_asked_for(store: CloudStore, direct: CloudStore) -> None:
    def chunks() -> Iterator[memoryview]:
        buffer = bytearray(40_000)
        for number in range(9):
            buffer[:] = bytes([number]) * len(buffer)
            yield memoryview(buffer)

    assert store.write_stream("a/b", chunks()) == 360_000
    assert direct.read("a/b") == b"".join(bytes([number]) * 40_000 for number in range(9))


@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_torn_upload_is_no_object(store: CloudStore, direct: CloudStore, proxy: FaultProxy, size: int) -> None:
    proxy.aim(NetworkFault.TORN_UP, "PUT", times=100)
    for operation in (store.create, store.write):
        with pytest.raises(StoreUnavailable):
            operation("a/b", bytes(size))
    assert direct.size("a/b") is None


def test_a_torn_download_is_never_used(proxied: CloudServer, store: CloudStore, proxy: FaultProxy) -> None:
    data = os.urandom(200_000)
    store.write("a/b", data)
    proxy.aim(NetworkFault.TORN_DOWN, "GET", times=1)
    with pytest.raises((StoreUnavailable, IntegrityError)):
        proxied.store(store._below, retry_policy=RetryPolicy(tries=1)).read("a/b")
    assert store.read("a/b") == data


def test_a_torn_download_goes_on_where_it_broke(
    store: CloudStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.stores.ranged_store.READ_CHUNK_BYTES", 50_000)
    data = os.urandom(5 * 50_000)
    store.write("a/b", data)
    proxy.requests.clear()
    proxy.aim(NetworkFault.TORN_DOWN, "GET", nth=3)
    assert b"".join(store.read_chunks("a/b")) == data
    assert len(proxy.requests) == 6


def test_an_object_replaced_while_it_is_read_is_refused(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.stores.ranged_store.READ_CHUNK_BYTES", 50_000)
    store.write("a/b", bytes(250_000))
    chunks = store.read_chunks("a/b")
    next(chunks)
    store.write("a/b", bytes([1]) * 250_000)
    with pytest.raises(IntegrityError, match="replaced while it was read"):
        list(chunks)


def test_a_server_that_ignores_the_condition_is_refused_by_name(store: CloudStore, proxy: FaultProxy) -> None:
    proxy.aim(NetworkFault.STRIP, "PUT", times=1_000_000)
    with pytest.raises(StoreUnsound, match="the second create of one key succeeded"):
        probe_store(store)


def test_a_server_behind_a_sound_network_is_accepted(store: CloudStore) -> None:
    assert (probe_store(store), store.keys("probe")) == ("", [])


@pytest.mark.parametrize("operation", ["read", "create", "write", "write_stream", "keys", "folders", "first"])
def test_a_bucket_that_does_not_exist_is_refused(proxied: CloudServer, operation: str) -> None:
    with cloud_environment(proxied):
        store = CloudStore(proxied.cloud, "no-such-bucket", "x")
    with pytest.raises(StoreRefused, match=r"no-such-bucket.*create the bucket"):
        OPERATIONS[operation](store, "a/b")


def test_a_url_leads_to_the_bucket_by_the_usual_variables(server: CloudServer) -> None:
    with cloud_environment(server):
        store = open_store(f"{server.cloud}://cairn/by-url/")
        assert store.create("a/b", b"1")
        assert (open_store(store.url).read("a/b"), store.url) == (b"1", f"{server.cloud}://cairn/by-url")


def test_a_signature_in_an_address_is_never_shown(proxied: CloudServer, proxy: FaultProxy) -> None:
    if proxied.cloud != "az":
        pytest.skip("only Azure signs addresses")
    proxy.aim(NetworkFault.INTERNAL_ERROR, ".*", times=1000)
    key = {"AZURE_STORAGE_SAS_KEY": "sv=2024-08-04&sp=rwdl&sig=s3cr3t%2Fvalue"}
    variables = {name: value for name, value in proxied.variables.items() if name != "AZURE_STORAGE_ACCOUNT_KEY"}
    with cloud_environment(CloudServer(cloud="az", variables={**variables, **key})):
        store = CloudStore("az", "cairn", "x", retry_policy=RetryPolicy(tries=1))
    with pytest.raises(StoreUnavailable) as error:
        store.read("a/b")
    assert any("sig=s3cr3t" in request for request in proxy.requests)
    assert "s3cr3t" not in str(error.value)
