"""Copies between the stores of two hosts, and peers that fail in the middle of one."""

import asyncio
import logging
import socket
import time
from contextlib import ExitStack

import msgspec
import pytest
import trustme
from peer_world import MIB, Host, ScriptedSource, connect, dialled, opening, pattern, send_bytes

from certificates import tls_settings
from medialane.arena import ENTRY_HEADER_BYTES, describe
from medialane.transfer import Pulls, StillWriting, peer_server, pulls
from medialane.transfer.peer_connection import (
    CloseEntry,
    EntryClosed,
    EntryOpened,
    OpenEntry,
    PeerHello,
    SendPayload,
    decode_from_source,
    decode_to_source,
)
from medialane.types.errors import (
    ArenaFull,
    HandoverFailed,
    MediaTooLarge,
    StartupFailed,
    TransferFailed,
    TransferTimeout,
    from_report,
    to_report,
)
from medialane.types.feature import Embedding, Feature, RemoteEntry
from medialane.types.media import EncodedMedia, MediaSize
from medialane.types.tensor import ArenaRange, TensorSpec
from medialane.wire import RpcConfig
from waiting import eventually


@pytest.fixture
async def source():
    host = Host()
    await host.serve()
    yield host
    await host.close()


@pytest.fixture
async def destination():
    host = Host()
    yield host
    await host.close()


@pytest.fixture
async def scripted():
    """Scripted sources, ended after the test."""
    sources = []

    async def make(script):
        sources.append(ScriptedSource(script))
        await sources[-1].listen()
        return sources[-1]

    yield make
    for each in sources:
        await each.close()


async def pull(host, entry):
    (pin,) = await host.pulls.pull([entry])
    return pin


async def test_copy_has_the_same_bytes_and_description_and_is_cached(source, destination, caplog):
    caplog.set_level(logging.INFO)
    with source.store("k") as stored:
        entry = source.grant(stored)
        with await pull(destination, entry) as copied:
            assert destination.pulls.mover_of(copied.range) == "tcp"
            assert f"entries of {entry.address} are copied by tcp" in caplog.messages
        assert source.pulls.mover_of(stored.range) is None
        with await pull(destination, source.grant(stored)) as copied:
            assert destination.payload(copied) == source.payload(stored)
            assert copied.value == msgspec.structs.replace(stored.value, tensors=copied.value.tensors)
            assert {tensor.range for tensor in copied.value.tensors} == {copied.range}
        assert destination.arena.contains("k")
        await eventually(lambda: source.arena.stats().num_leases == 1, "the source's hold has ended")


async def test_encoded_bytes_are_copied_like_features(source, destination):
    reservation = source.arena.reserve(1000, "encoded")
    reservation.buffer[:] = pattern("png", 1000)
    encoded = EncodedMedia("image", "hash", "image/png", reservation.range, ENTRY_HEADER_BYTES, 1000)
    with source.arena.publish(reservation, "hash", encoded) as stored:
        with await pull(destination, source.grant(stored)) as copied:
            assert destination.payload(copied) == source.payload(stored)
            assert copied.value == msgspec.structs.replace(encoded, range=copied.range)
        assert destination.arena.lookup("hash", "encoded").release() is None


def stored_embedding(host, key="e", fill=b"e"):
    """Cache an embedding of 1000 bytes; return its pin."""
    reservation = host.arena.reserve(1000, "embedded")
    reservation.buffer[:] = fill * 1000
    (tensor,) = describe(reservation.range, [TensorSpec("uint8", (10, 100))])
    return host.arena.publish(
        reservation, key, Feature("image", "k", b"header", (), MediaSize(width=3), Embedding(key, tensor))
    )


async def test_embeddings_are_copied_like_features_which_are_evicted_first_then(source, destination):
    for key in ("k", "l"):
        destination.store(key, 7 * MIB).release()
    destination.arena.lookup("k").release()
    with stored_embedding(source) as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored)
        assert copied.value.embedding.tensor.range == copied.range
        assert copied.value.embedding.tensor.spec == stored.value.embedding.tensor.spec
        assert msgspec.structs.replace(copied.value, embedding=stored.value.embedding) == stored.value
    with destination.arena.lookup("e", "embedded"):
        destination.store("m", 7 * MIB).release()
    assert [destination.arena.contains(key) for key in "klm"] == [False, True, True]


async def test_entry_that_is_here_is_not_copied_again(source, destination):
    with (
        source.store("k") as stored,
        destination.store("k") as own,
        await pull(destination, source.grant(stored)) as found,
    ):
        assert found.range == own.range
    assert destination.pulls.stats.num_pulls == {}


async def test_concurrent_pulls_of_an_entry_copy_it_once_over_a_connection_that_is_used_again(source, destination):
    with source.store("k") as stored, source.store("l") as other:
        entry = source.grant(stored)
        for pin in await destination.pulls.pull([entry] * 20):
            pin.release()
        (await pull(destination, source.grant(other))).release()
    assert destination.pulls.stats.num_pulls == {"tcp": 2}
    assert source.pulls.num_connections == 1


async def test_many_entries_are_copied_at_the_same_time(source, destination):
    pins = [source.store(f"key {number}", 50_000) for number in range(40)]
    copies = await destination.pulls.pull([source.grant(pin) for pin in pins])
    for stored, copied in zip(pins, copies, strict=True):
        assert destination.payload(copied) == source.payload(stored)
        copied.release()
        stored.release()


async def test_copy_waits_for_the_entry_even_if_its_gateway_has_gone(source, destination):
    with source.store("k") as stored:
        entry = source.grant(stored)
    (await pull(destination, entry)).release()


async def test_evicted_entry_is_refused_even_if_another_one_is_at_its_place(source, destination):
    with source.store("k") as stored:
        entry = source.grant(stored)
    source.arena.evict("k")
    with source.store("k") as again:
        assert again.range.offset == entry.range.offset
        with pytest.raises(TransferFailed, match="no longer"):
            await pull(destination, entry)


async def test_entry_without_a_valid_capability_is_refused_and_the_connection_stays_usable(source, destination):
    with source.store("k") as stored, source.store("secret") as secret:
        entry = source.grant(stored)
        forged = msgspec.structs.replace(entry, range=secret.range, key="secret")
        with pytest.raises(TransferFailed, match="capability"):
            await pull(destination, forged)
        (await pull(destination, entry)).release()
    assert source.arena.stats().num_leases == 0


async def test_only_entries_that_a_client_holds_are_granted(source, destination):
    with source.store("k") as stored:
        pass
    with pytest.raises(HandoverFailed):
        source.grant(stored)
    with destination.store("k") as own, pytest.raises(HandoverFailed, match="--peer-listen"):
        destination.grant(own)


async def test_full_arena_fails_the_pull_and_leaves_nothing(source, destination):
    with source.store("k", 9 * MIB) as stored:
        with destination.store("held", 9 * MIB), pytest.raises(ArenaFull):
            await pull(destination, source.grant(stored))
        (await pull(destination, source.grant(stored))).release()


async def test_other_entry_under_the_same_key_is_not_used(source, destination):
    with (
        source.store("k", 1000) as stored,
        destination.store("k", 2000),
        pytest.raises(TransferFailed, match="another entry"),
    ):
        await pull(destination, source.grant(stored))


async def test_store_that_cannot_be_reached_fails_at_once_for_a_moment(source, destination):
    with source.store("k") as stored:
        entry = msgspec.structs.replace(source.grant(stored), address="tcp://127.0.0.1:1")
        for reason in ("cannot be reached", "a moment ago"):
            with pytest.raises(TransferFailed, match=reason):
                await pull(destination, entry)


@pytest.mark.parametrize("is_silent", [True, False])
async def test_address_of_a_store_that_does_not_answer_is_not_the_only_one_tried(
    source, destination, resolve_names, is_silent
):
    """As of a host whose IPv6 route is dead."""
    port = int(source.address.rpartition(":")[2])
    with ExitStack() as stack:
        if is_silent:  # its backlog is full: the kernel drops further connections
            silent = stack.enter_context(socket.create_server(("127.0.0.3", port), backlog=0))
            for _ in range(3):
                full = stack.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(silent.getsockname())
        resolve_names(("127.0.0.3", port), ("127.0.0.1", port))
        with source.store("k") as stored:
            entry = msgspec.structs.replace(source.grant(stored), address=f"tcp://store.example:{port}")
            started = time.monotonic()
            (await pull(destination, entry)).release()
            assert time.monotonic() - started < 5, "the delay between two addresses, not the time for a connection"


@pytest.mark.parametrize("address", ["unix:/tmp/x.sock", "tcp://0.0.0.0:0", "tcp://10.255.255.1:0", "nonsense"])
async def test_address_that_is_not_one_of_this_host_is_refused(destination, address):
    with pytest.raises(StartupFailed):
        await destination.pulls.serve(address)


async def test_peer_without_the_secret_is_refused(source, destination):
    stranger = Pulls(destination.arena, RpcConfig(shared_secret="another secret of enough bytes"))
    with source.store("k") as stored, pytest.raises(TransferFailed, match=r"authenticate|secret"):
        await stranger.pull([source.grant(stored)])
    await stranger.close()


async def test_entry_is_copied_over_tls_where_both_sides_have_it(tmp_path, source):
    config = RpcConfig(shared_secret="a secret for this test alone", **tls_settings(tmp_path, trustme.CA()))
    one, other = Host(config), Host(config)
    await one.serve()
    with one.store("k", 3 * MIB) as stored, await pull(other, one.grant(stored)) as copied:
        assert other.payload(copied) == one.payload(stored)
    with source.store("l") as stored, pytest.raises(TransferFailed):
        await pull(other, source.grant(stored))
    await other.close()
    await one.close()


# Large entries.


@pytest.fixture(params=["plain", "TLS"])
async def hosts(request, tmp_path):
    """A source and a destination, perhaps with TLS."""
    files = tls_settings(tmp_path, trustme.CA()) if request.param == "TLS" else {}
    config = RpcConfig(shared_secret="a secret for this test alone", **files)
    made = [Host(config), Host(config, max_streams=3, min_part_bytes=MIB // 2)]
    await made[0].serve()
    yield made
    for host in reversed(made):
        await host.close()


@pytest.mark.parametrize(("num_bytes", "num_streams"), [(MIB - 1000, 1), (MIB + 5, 2), (9 * MIB // 2 + 7, 3)])
async def test_large_entry_is_copied_over_several_connections(hosts, num_bytes, num_streams):
    source, destination = hosts
    with source.store("key", num_bytes) as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored)
        assert source.pulls.num_connections == num_streams
        assert destination.pulls.stats.num_pulls == {"tcp": 1}
        await eventually(lambda: source.arena.stats().num_leases == 1, "every connection has released its hold")


async def test_failure_of_one_part_ends_all_of_them_before_the_range_is_free(scripted, source):
    destination, stopped = Host(min_part_bytes=MIB // 2), []

    async def script(peer):
        await opening(peer, stored.value)
        if not stopped:
            stopped.append(peer)  # sends nothing
            await peer.receive(decode_to_source)

    with source.store("k", 4 * MIB) as stored:
        with pytest.raises(TransferFailed, match=r"closed|lost"):
            await pull(destination, (await scripted(script)).entry("k", stored))
        assert stopped
        assert destination.arena.stats().num_reservations == 0
        with pytest.raises(TransferFailed):
            await stopped[0].receive(decode_to_source)  # its connection has been closed
    await destination.close()


async def test_large_entry_is_copied_over_several_connections_when_another_mover_fails(two_hosts):
    source, destination, mover = two_hosts
    mover.errors = [TransferFailed("broken")]
    with source.store("key", 3 * MIB) as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored)
    assert source.pulls.num_connections == 4
    assert destination.pulls.stats.num_pulls == {"tcp": 1}


# Sources that fail. The deadline of a pull is shortened where it is waited for.


@pytest.fixture
def limit_pulls(monkeypatch):
    """Have pulls take at most this time."""
    return lambda seconds: monkeypatch.setattr(pulls, "longest_pull_s", lambda _: seconds)


@pytest.fixture
def short_pulls(limit_pulls):
    limit_pulls(0.3)


async def nothing(*_):
    """The source dies."""


def sends_half(feature, then, num_bytes=None):
    """Send half of the payload, and call `then` with the connection and the other half."""

    async def script(peer):
        await opening(peer, feature)
        payload = pattern(feature.mm_hash, num_bytes or feature.tensors[0].range.nbytes - ENTRY_HEADER_BYTES)
        await send_bytes(peer, payload[: len(payload) // 2])
        await then(peer, payload[len(payload) // 2 :])

    return script


async def test_source_that_dies_before_or_during_a_pull_fails_it_and_the_range_is_free(destination, scripted, source):
    with source.store("k") as stored:
        for script in (nothing, sends_half(stored.value, nothing)):
            with pytest.raises(TransferFailed, match=r"closed|lost"):
                await pull(destination, (await scripted(script)).entry("k", stored))
            assert destination.arena.stats().num_reservations == 0
        (await pull(destination, source.grant(stored))).release()


async def test_nothing_lands_late_of_a_source_that_stops_and_resumes(destination, scripted, source, short_pulls):
    resumed = asyncio.Event()

    async def resume(peer, rest):
        await resumed.wait()
        await send_bytes(peer, rest)

    with source.store("k") as stored:
        stopped = await scripted(sends_half(stored.value, resume))
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="in time"):
            await pull(destination, stopped.entry("k", stored))
        assert time.monotonic() - started < 5
        reused = destination.arena.reserve(stored.range.nbytes - ENTRY_HEADER_BYTES)
        assert reused.range.offset == stored.range.offset, "the range of the read that was given up"
        reused.buffer[:] = canary = b"\xc5" * len(reused.buffer)
        resumed.set()
        await stopped.ended()
        assert reused.buffer == canary
        reused.abandon()


async def test_cancelled_pull_ends_its_read_before_the_range_is_free(destination, scripted, source):
    half_sent = asyncio.Event()

    async def stop(peer, rest):
        half_sent.set()
        await peer.receive(decode_to_source)

    with source.store("k") as stored:
        stopped = await scripted(sends_half(stored.value, stop))
        pulling = asyncio.create_task(pull(destination, stopped.entry("k", stored)))
        await eventually(half_sent.is_set)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await eventually(lambda: destination.arena.stats().num_reservations == 0)


async def test_bytes_whose_hold_the_source_did_not_confirm_are_not_used(destination, scripted, source):
    async def no_confirmation(peer, rest):
        await send_bytes(peer, rest)
        await peer.receive(decode_to_source)

    with source.store("k") as stored, pytest.raises(TransferFailed):
        await pull(destination, (await scripted(sends_half(stored.value, no_confirmation))).entry("k", stored))
    assert not destination.arena.contains("k")


async def test_source_that_describes_another_entry_is_not_believed(destination, scripted, source):
    async def finish(peer, rest):
        await send_bytes(peer, rest)
        await peer.receive(decode_to_source)
        await peer.send(EntryClosed())

    with source.store("k") as stored, source.store("l") as other:
        wrong = msgspec.structs.replace(stored.value, tensors=other.value.tensors)
        with pytest.raises(TransferFailed, match="another entry"):
            await pull(destination, (await scripted(sends_half(wrong, finish))).entry("k", stored))


@pytest.mark.parametrize("wrong", ["range", "key", "tensors", "kind"])
async def test_source_that_describes_another_embedding_is_not_believed(destination, scripted, source, wrong):
    async def close(peer, rest):
        await send_bytes(peer, rest)
        await peer.receive(decode_to_source)
        await peer.send(EntryClosed())

    with stored_embedding(source) as stored, stored_embedding(source, "f") as other, source.store("k") as feature:
        value, embedding = stored.value, stored.value.embedding
        described = {
            "range": {"embedding": msgspec.structs.replace(embedding, tensor=other.value.embedding.tensor)},
            "key": {"embedding": msgspec.structs.replace(embedding, key="f")},
            "tensors": {"tensors": feature.value.tensors},
            "kind": {"embedding": None},
        }[wrong]
        script = sends_half(msgspec.structs.replace(value, **described), close, num_bytes=1000)
        entry = msgspec.structs.replace((await scripted(script)).entry("e", stored), kind="embedded")
        with pytest.raises(TransferFailed, match="another entry"):
            await pull(destination, entry)
    assert destination.arena.stats().num_entries == 0


@pytest.mark.parametrize("answer", [EntryClosed(), OpenEntry, b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"], ids=str)
async def test_source_that_violates_the_protocol_fails_the_pull(destination, scripted, source, answer):
    async def script(peer):
        await peer.receive(decode_to_source)
        if isinstance(answer, bytes):
            await send_bytes(peer, answer)
        else:
            await peer.send(EntryOpened(offers={"tcp": b""}) if answer is OpenEntry else answer)

    with source.store("k") as stored, pytest.raises(TransferFailed):
        await pull(destination, (await scripted(script)).entry("k", stored))


# Movers other than tcp.


class FakeMover:
    """Fills the destination, unless it fails."""

    name = "nixl"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_reads = 0
        self.num_starts = 0
        self.hangs = False

    def is_ready(self) -> bool:
        self.num_starts += 1
        return True

    async def offer(self, *, wait: bool) -> bytes | None:
        return b"metadata"

    async def read(self, source, destination, *, deadline_s: float) -> None:
        assert source.offers["nixl"] == b"metadata"
        self.num_reads += 1
        if self.errors:
            raise self.errors.pop(0)
        if self.hangs:
            await asyncio.sleep(deadline_s)  # time: until it is given up
            raise TransferFailed("timed out")
        destination.payload[:] = pattern(source.entry.key, len(destination.payload))

    async def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
async def two_hosts():
    """A source and a destination with a fake mover, whose errors can be set."""
    mover, sources_mover = FakeMover(), FakeMover()
    source, destination = Host(mover=sources_mover), Host(mover=mover, min_part_bytes=MIB // 2)
    source.mover = sources_mover
    await source.serve()
    yield source, destination, mover
    await destination.close()
    await source.close()


async def test_preferred_mover_that_both_sides_have_is_used(two_hosts):
    source, destination, mover = two_hosts
    with source.store("k") as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored)
    assert (mover.num_reads, destination.pulls.stats.num_pulls) == (1, {"nixl": 1})


async def test_chosen_mover_is_used_and_no_other(two_hosts):
    source, destination, mover = two_hosts
    mover.errors = [TransferFailed("broken")]
    with source.store("k") as stored:
        with pytest.raises(TransferFailed, match="broken"):
            await pull(destination, msgspec.structs.replace(source.grant(stored), mover="nixl"))
        (await pull(destination, msgspec.structs.replace(source.grant(stored), mover="tcp"))).release()
    assert (mover.num_reads, destination.pulls.stats.num_pulls) == (1, {"tcp": 1})


async def test_mover_that_fails_falls_back_to_tcp_and_is_avoided_for_a_time(two_hosts, caplog):
    source, destination, mover = two_hosts
    mover.errors = [TransferFailed("broken")] * 9
    for number in range(4):
        with source.store(f"k{number}") as stored, await pull(destination, source.grant(stored)) as copied:
            assert destination.payload(copied) == source.payload(stored)
    assert mover.num_reads == 2
    assert destination.pulls.stats.num_failed == {"nixl": 2}
    assert sum("not pulled by nixl for a while" in record.message for record in caplog.records) == 1


async def test_range_that_may_still_be_written_is_not_reused_before_the_mover_permits_it(two_hosts):
    source, destination, mover = two_hosts
    ended = asyncio.Event()
    mover.errors = [StillWriting(ended.wait())]
    with source.store("k") as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored), "by tcp, into another range"
        assert destination.arena.stats().num_reservations == 1
        assert destination.pulls.stats.num_quarantined == 1
        ended.set()
        await eventually(lambda: destination.pulls.stats.num_quarantined == 0)
        assert destination.arena.stats().num_reservations == 0


async def test_chosen_mover_that_is_given_up_fails_the_pull_with_an_error_for_other_processes(two_hosts):
    source, destination, mover = two_hosts
    ended = asyncio.Event()
    mover.errors = [StillWriting(ended.wait())]
    with source.store("k") as stored, pytest.raises(TransferFailed) as raised:
        await pull(destination, msgspec.structs.replace(source.grant(stored), mover="nixl"))
    rebuilt = from_report(to_report(raised.value))
    assert (type(rebuilt), rebuilt.message) == (TransferTimeout, raised.value.message)
    ended.set()
    await eventually(lambda: destination.pulls.stats.num_quarantined == 0)


async def test_mover_that_hangs_leaves_time_for_the_next(two_hosts, limit_pulls):
    source, destination, mover = two_hosts
    limit_pulls(2.0)
    mover.hangs = True
    with source.store("k") as stored, await pull(destination, source.grant(stored)) as copied:
        assert destination.payload(copied) == source.payload(stored)
    assert destination.pulls.stats.num_pulls == {"tcp": 1}


async def test_movers_are_started_when_a_peer_connects(two_hosts):
    source, destination, mover = two_hosts
    with source.store("k") as stored:
        entry = source.grant(stored)
    peer = await connect(entry.address)
    await eventually(lambda: source.mover.num_starts)
    peer.abort()
    with pytest.raises(TransferFailed):  # before it is known whether the source has the mover, too
        await pull(destination, msgspec.structs.replace(entry, address="tcp://127.0.0.1:1"))
    assert mover.num_starts


async def test_entry_that_cannot_fit_is_refused_before_its_store_is_asked(destination):
    for nbytes in (0, 16 * MIB + 4096, 1 << 62):
        entry = RemoteEntry(ArenaRange("0" * 32, 4096, nbytes, 1), "processed", "k", "tcp://127.0.0.1:1", 0, b"")
        with pytest.raises(MediaTooLarge):
            await pull(destination, entry)


# Destinations that fail.


@pytest.fixture
def short_holds(monkeypatch):
    monkeypatch.setattr(peer_server, "longest_hold_s", lambda _: 0.3)


async def held_by(source, peer, entry, *messages):
    await peer.send(OpenEntry(entry), *messages)
    await peer.receive(decode_from_source)
    assert source.arena.stats().num_leases == 1


async def test_destination_that_dies_ends_its_hold(source):
    with source.store("k") as stored:
        entry = source.grant(stored)
    peer = await connect(entry.address)
    await held_by(source, peer, entry, SendPayload(0, 16))
    peer.abort()
    await eventually(lambda: source.arena.stats().num_leases == 0)


async def test_hold_of_a_destination_that_stops_reading_ends_and_is_not_confirmed_later(source, short_holds):
    with source.store("k", 15 * MIB) as stored:
        entry = source.grant(stored)
    peer = await connect(entry.address)
    await held_by(source, peer, entry, SendPayload(0, entry.range.nbytes - ENTRY_HEADER_BYTES))
    await eventually(lambda: source.arena.stats().num_leases == 0)

    async def resume():
        await peer.receive_into(memoryview(bytearray(entry.range.nbytes - ENTRY_HEADER_BYTES)))
        await peer.send(CloseEntry())
        await peer.receive(decode_from_source)

    with pytest.raises(TransferFailed):
        await resume()
    peer.abort()


@pytest.mark.parametrize("message", [CloseEntry(), EntryClosed()], ids=str)
async def test_destination_that_violates_the_protocol_is_disconnected(source, message):
    peer = await connect(source.address)
    await peer.send(message)
    with pytest.raises(TransferFailed):
        await peer.receive(decode_from_source)
    peer.abort()


async def test_part_that_is_not_one_of_the_payload_is_not_sent(source):
    with source.store("k") as stored:
        entry = source.grant(stored)
    for start, stop in ((0, entry.range.nbytes), (-1, 5), (9, 5)):
        peer = await connect(entry.address)
        await held_by(source, peer, entry)
        await peer.send(SendPayload(start, stop))
        with pytest.raises(TransferFailed):
            await peer.receive(decode_from_source)
        peer.abort()
        await eventually(lambda: source.arena.stats().num_leases == 0)


async def test_store_that_stops_ends_its_connections_and_holds(source):
    with source.store("k") as stored:
        entry = source.grant(stored)
    peer = await connect(entry.address)
    await held_by(source, peer, entry)
    await source.pulls.close()
    assert source.arena.stats().num_leases == 0
    with pytest.raises(TransferFailed):
        await peer.receive(decode_from_source)
    peer.abort()


async def test_store_of_another_release_is_refused_by_its_number(source):
    peer = await dialled(source.address)
    await peer.send(PeerHello("0" * 32, version=99))
    refused = await peer.receive(decode_from_source)
    assert "other host's store speaks protocol 99" in refused.error.message
    assert "same release" in refused.error.message
