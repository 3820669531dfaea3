"""The real client and a network that breaks: what was acknowledged is there once, what was not is not used."""

import hashlib
import os
import re

import pytest

from cairn.storage.checkpoints.resume_point import newest_verified
from cairn.storage.errors import IntegrityError, StoreRefused, StoreUnavailable, StoreUnsound
from cairn.storage.stores.object_store import RetryPolicy, run_retry_policy, write_hashed
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from cairn.storage.stores.store_probe import probe_store
from tests.entries import evaluated, writer
from tests.s3.fault_proxy import FaultProxy, NetworkFault, at_every_place
from tests.s3.servers import S3Server
from tests.storage.builders import LOG, check_invariants, claim, commit, open_run, run_log, stage

REFUSALS = [NetworkFault.REFUSED, NetworkFault.EXPIRED]
# A late request is done when somebody says so: the campaign does.
BREAKS = [fault for fault in NetworkFault if fault not in (NetworkFault.STRIP, NetworkFault.LATE, *REFUSALS)]
ENTRY = rf"PUT .*{LOG}/"
MULTIPART = {
    "begin": r"POST .*\?uploads",
    "first-part": r"PUT .*partNumber=1\b",
    "last-part": r"PUT .*partNumber=3\b",
    "complete": r"POST .*\?uploadId",
}


@pytest.mark.parametrize(("times", "fault"), at_every_place({"once": 1, "twice": 2}, BREAKS, whole="once"))
def test_an_append_whose_put_breaks_is_in_the_log_once(
    store: S3Store, direct: S3Store, proxy: FaultProxy, fault: NetworkFault, times: int
) -> None:
    open_run(store)
    aim = proxy.aim(fault, ENTRY, times=times)
    run_log(store).append(lambda state: evaluated(1, 1.0), writer=writer())
    assert aim.fired
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.name)
def test_an_append_is_in_the_log_once_though_reading_it_back_breaks_too(
    store: S3Store, direct: S3Store, proxy: FaultProxy, fault: NetworkFault
) -> None:
    open_run(store)
    log = run_log(store)
    log.refresh()
    proxy.aim(NetworkFault.RESPONSE_LOST, ENTRY)
    aim = proxy.aim(fault, rf"GET .*{LOG}/9999999998")
    log.append(lambda state: evaluated(1, 1.0), writer=writer())
    assert aim.fired
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: fault.name)
def test_an_append_that_is_refused_is_one_request_and_is_made_once_it_is_allowed(
    store: S3Store, direct: S3Store, proxy: FaultProxy, fault: NetworkFault
) -> None:
    log = open_run(store)
    aim = proxy.aim(fault, ENTRY, times=1000)
    with pytest.raises(StoreRefused, match=f"{LOG}/.*(AccessDenied.*allow|ExpiredToken.*renew)"):
        run_retry_policy(600.0).call(lambda: log.append(lambda state: evaluated(1, 1.0), writer=writer()))
    assert aim.seen == 1
    proxy.aims.clear()
    log.append(lambda state: evaluated(1, 1.0), writer=writer())
    assert [item.step for item in check_invariants(direct, set()).evaluations] == [1]


def kinds_of_requests(requests: list[str]) -> set[str]:
    """Return a pattern for each kind: the method and the name of the object without its numbers."""
    return {rf"{request.split(' ')[0]} .*{re.escape(last_name(request))}" for request in requests}


def last_name(request: str) -> str:
    return re.sub(r"[0-9].*", "", request.partition("?")[0].rsplit("/", 1)[1])


def test_a_commit_survives_one_503_at_each_kind_of_request(store: S3Store, direct: S3Store, proxy: FaultProxy) -> None:
    log = open_run(store)
    attempt = claim(log)
    commit(log, stage(store, step=5, attempt=attempt))
    proxy.requests.clear()
    commit(log, stage(store, step=6, attempt=attempt))
    kinds = sorted(kinds_of_requests(proxy.requests))
    assert len(kinds) >= 4, kinds
    prefixes = set()
    for step, kind in enumerate(kinds, 10):
        aims = [proxy.aim(fault, kind) for fault in (NetworkFault.SLOW_DOWN, NetworkFault.RESPONSE_LOST)]
        staged = stage(store, step=step, attempt=attempt)
        prefixes.add(staged.prefix)
        commit(log, staged)
        assert all(aim.fired for aim in aims), kind
    state = check_invariants(direct, prefixes)
    newest = newest_verified(run_log(direct), writer=writer())
    assert newest is not None
    assert (newest.step, len(state.checkpoints)) == (9 + len(kinds), 2 + len(kinds))


@pytest.mark.parametrize(("request_", "fault"), at_every_place(MULTIPART, BREAKS, whole="complete"))
def test_a_stream_survives_any_break_of_any_of_its_requests(
    store: S3Store, direct: S3Store, proxy: FaultProxy, part_bytes: int, request_: str, fault: NetworkFault
) -> None:
    aim = proxy.aim(fault, request_)
    data = os.urandom(2 * part_bytes + 5)
    written = write_hashed(store, "a/b", [data])
    assert aim.fired
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert hashlib.sha256(direct.read("a/b")).hexdigest() == written.sha256


@pytest.mark.parametrize("fault", [NetworkFault.SLOW_DOWN, NetworkFault.TORN_UP, NetworkFault.RESPONSE_LOST])
@pytest.mark.parametrize("request_", ["first-part", "complete"])
def test_a_stream_that_never_gets_through_leaves_nothing(
    store: S3Store, direct: S3Store, proxy: FaultProxy, part_bytes: int, request_: str, fault: NetworkFault
) -> None:
    proxy.aim(fault, MULTIPART[request_], times=1000)
    proxy.aim(NetworkFault.SLOW_DOWN, "HEAD .*", times=1000)
    with pytest.raises(StoreUnavailable):
        store.write_stream("a/b", [bytes(2 * part_bytes + 5)])
    there = request_ == "complete" and fault is NetworkFault.RESPONSE_LOST
    assert (direct.keys("a"), direct.unfinished("a")) == (["a/b"] if there else [], [])


@pytest.mark.parametrize("fault", [*BREAKS, *REFUSALS], ids=lambda fault: fault.name)
def test_many_objects_are_deleted_whatever_becomes_of_the_one_request_for_all(
    store: S3Store, direct: S3Store, proxy: FaultProxy, fault: NetworkFault
) -> None:
    for name in "abc":
        direct.write(f"a/{name}", b"1")
    aim = proxy.aim(fault, r"POST .*\?delete", times=1)
    store.delete_all(["a/a", "a/c"])
    assert (aim.fired, direct.keys("a")) == (True, ["a/b"])


def test_an_object_that_may_not_be_deleted_is_named(store: S3Store, direct: S3Store, proxy: FaultProxy) -> None:
    direct.write("a/b", b"1")
    proxy.aim(NetworkFault.REFUSED, r"(POST .*\?delete|DELETE)", times=1000)
    with pytest.raises(StoreRefused, match=r"a/b: cannot delete: AccessDenied.*allow these credentials"):
        store.delete_all(["a/b"])


@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_torn_upload_is_no_object(store: S3Store, direct: S3Store, proxy: FaultProxy, size: int) -> None:
    proxy.aim(NetworkFault.TORN_UP, "PUT", times=100)
    for operation in (store.create, store.write):
        with pytest.raises(StoreUnavailable):
            operation("a/b", bytes(size))
    assert direct.size("a/b") is None


def test_a_torn_download_is_never_used(proxied_bucket: S3Bucket, store: S3Store, proxy: FaultProxy) -> None:
    data = os.urandom(200_000)
    store.write("a/b", data)
    proxy.aim(NetworkFault.TORN_DOWN, "GET", times=3)
    with pytest.raises((StoreUnavailable, IntegrityError)):
        S3Store(proxied_bucket, store._below, retry_policy=RetryPolicy(tries=1)).read("a/b")
    assert store.read("a/b") == data
    assert proxy.aims[-1].seen > 3


def test_a_torn_download_goes_on_where_it_broke(
    store: S3Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.stores.ranged_store.READ_CHUNK_BYTES", 50_000)
    data = os.urandom(5 * 50_000)
    store.write("a/b", data)
    proxy.requests.clear()
    proxy.aim(NetworkFault.TORN_DOWN, "GET", nth=3)
    assert hashlib.sha256(b"".join(store.read_chunks("a/b"))).digest() == hashlib.sha256(data).digest()
    assert len(proxy.requests) == 6


def test_a_server_that_does_not_answer_is_given_up(store: S3Store, proxy: FaultProxy) -> None:
    proxy.aim(NetworkFault.HANG, "GET", times=100)
    with pytest.raises(StoreUnavailable, match="no answer in time"):
        store.read("a/b")


# Where signatures are checked, a request without its signed header is refused before it can be ignored.
@pytest.mark.parametrize("server", ["quick"], indirect=True)
def test_a_server_that_ignores_the_condition_is_refused_by_name(
    server: S3Server, store: S3Store, proxy: FaultProxy
) -> None:
    proxy.aim(NetworkFault.STRIP, "PUT", times=1_000_000)
    with pytest.raises(StoreUnsound, match="ignores If-None-Match: the second create of one key succeeded"):
        probe_store(store)


def test_a_server_behind_a_sound_network_is_accepted(store: S3Store, proxy: FaultProxy) -> None:
    probe_store(store)
    assert store.keys("probe") == []
