"""Media that clients send once, through the store's socket: what keeps their bytes, for whom, and what ends that."""

from __future__ import annotations

import asyncio
import io
import secrets
import time
import zlib
from contextlib import suppress

import pytest
from PIL import Image
from store_world import IDLE, RPC, Client

from builders import MIB, Clock
from medialane.arena import Arena, ArenaConfig, Lineage, NamesArea
from medialane.media import MediaConfig
from medialane.store import (
    Aliases,
    AskLease,
    FindItem,
    Items,
    MediaLeases,
    PutMedia,
    ResolveAlias,
    SendData,
    StoreConfig,
    StoreServer,
    StoreStatus,
)
from medialane.store.messages import Proceed
from medialane.transfer import Pulls
from medialane.types.errors import (
    ArenaFull,
    InvalidImage,
    InvalidRequest,
    InvalidUpload,
    MediaLeasesFull,
    MediaTooLarge,
    UnknownMedia,
    UnknownMediaUuid,
    UuidConflict,
)
from medialane.types.hashing import content_hash
from medialane.types.media import Alias, MediaRef, MediaSize
from medialane.types.media_lease import MEDIA_SCHEME, TENANT
from medialane.types.stats import StoreStats
from poison import poison_freed
from waiting import eventually

MEDIA = MediaConfig()
OWNER, OTHER = TENANT + "search", TENANT + "nightly"
WAV = b"RIFF" + (36 + 64).to_bytes(4, "little") + b"WAVEfmt " + bytes([16, 0, 0, 0, 1, 0, 1, 0]) + (
    (16000).to_bytes(4, "little") + (32000).to_bytes(4, "little") + bytes([2, 0, 16, 0])
) + b"data" + (64).to_bytes(4, "little") + bytes(64)  # fmt: skip
MATROSKA = b"\x1a\x45\xdf\xa3\x93\x42\x82\x88matroska" + bytes(64)


def png(seed: int = 0, num_bytes: int = 0, size: tuple[int, int] = (60, 40)) -> bytes:
    """An image, with a comment so long that it has this size."""
    file = io.BytesIO()
    Image.new("RGB", size, (seed % 256, seed // 256, 7)).save(file, "PNG")
    data = file.getvalue()
    text = b"tEXt" + b"Comment".ljust(num_bytes - len(data) - 12, b"\0")
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    return data[:33] + chunk + data[33:]


class Pool:
    """Preparers that measure all media alike."""

    finds_damage, size = False, MediaSize(num_samples=32, sample_rate=16000)

    async def measure(self, encoded):
        if self.finds_damage:
            raise InvalidImage("damaged")
        return self.size

    async def probe_item(self, encoded):
        """Find no damage."""


class World:
    """A store without preparers, and its clients."""

    wait_timeout_s, directory = 2.0, "/dev/shm"

    def __init__(self, clock=None, max_leases=65_536, **config):
        self.address = f"unix:/tmp/medialane-test-{secrets.token_hex(6)}.sock"
        self.clock, self.config, self.pool = clock or Clock(), StoreConfig(**config), Pool()
        self.lineage = Lineage(owner=secrets.token_bytes(16))  # a world in another process takes no arena of this one
        self.clients, self.max_leases = [], max_leases

    async def start(self):
        self.arena = arena = Arena.open(ArenaConfig(size_bytes=16 * MIB), lineage=self.lineage)
        self.names = NamesArea(arena.path, first_byte=arena.end_bytes, nonce=arena.nonce, max_records=64)
        records, aliases = self.names.records("lease"), Aliases(max_aliases=8, ttl_s=60, clock=self.clock)
        self.leases = MediaLeases(
            arena,
            self.config,
            MEDIA,
            aliases=aliases,
            pool=self.pool,
            clock=self.clock,
            records=records,
            max_leases=self.max_leases,
        )
        self.items = Items(
            arena=arena,
            pool=self.pool,
            fetcher=None,
            media=MEDIA,
            aliases=aliases,
            leases=self.leases,
        )
        self.server = StoreServer(
            self.items, arena, RPC, pulls=Pulls(arena, RPC), max_connections=8, processor=dict, status=self._status
        )
        await self.server.serve(self.address)
        return self

    def _status(self):
        return StoreStatus(StoreStats(self.arena.stats(), IDLE, leases=self.leases.stats))

    async def replace_store(self):
        """As kill -9 of the store's process, which leaves the arena as it is, and the start of another."""
        self.arena.leave()
        await self.stop()
        await self.start()

    async def stop(self):
        await self.server.close()
        self.leases.close()
        self.names.close()
        assert self.arena.stats().num_reservations == 0
        self.arena.close()

    async def client(self):
        client = Client(self)
        self.clients.append(client)
        await asyncio.wait_for(client.link.ready(), 5)
        return client

    async def end(self):
        for client in self.clients:
            await client.exit()
        self.leases.close()
        await eventually(lambda: self.arena.stats().num_leases == 0)
        await self.stop()

    def fill(self):
        """Use all memory that is not held for other media."""
        held = []
        with suppress(ArenaFull):
            while True:
                held.append(self.arena.reserve(MIB))
        for reservation in held:
            reservation.abandon()


@pytest.fixture
async def make_world(monkeypatch):
    poison_freed(monkeypatch)
    worlds = []

    async def make(**config):
        worlds.append(await World(**config).start())
        return worlds[-1]

    yield make
    for world in worlds:
        await world.end()


@pytest.fixture
async def world(make_world):
    return await make_world()


async def put(client, data, owner=OWNER, *, declared=True, **fields):
    """Send media as a gateway does."""
    sent, old = 0, None

    async def answer(question):
        nonlocal sent, old
        assert isinstance(question, SendData)
        payload = client.link.payload(question.range)
        if old is not None:
            payload[:sent] = client.link.payload(old)[:sent]
        old, end = question.range, min(len(payload), len(data))
        payload[sent:end], sent = data[sent:end], end
        return (
            Proceed(question.call_id, len(data), content_hash(data)) if end == len(data) else Proceed(question.call_id)
        )

    fields = {"salt": "", "num_bytes": len(data) if declared else 0, "timeout_s": 10.0, **fields}
    return (await client.link.call(lambda call_id: PutMedia(call_id, owner, **fields), answer)).media[0]


async def ask(client, action, media, owner=OWNER, ttl_s=None):
    return (await client.link.call(lambda call_id: AskLease(call_id, owner, media, action, ttl_s))).media[0]


async def use(client, media, owner=OWNER, salt="", modality="image"):
    """Return the bytes of a reference, as a request finds them."""
    ref = MediaRef(modality, "messages[0]", url=MEDIA_SCHEME + media, salt=salt, owner=owner)

    async def proceed(_question):
        return None

    found = await client.link.call(lambda call_id: FindItem(call_id, ref, "encoded"), proceed)
    encoded = found.encoded
    try:
        payload = client.link.payload(encoded.range)
        return bytes(payload[: encoded.num_bytes])
    finally:
        client.link.release(found.hold_id, encoded.range.arena)


@pytest.mark.parametrize("declared", [True, False])
async def test_leased_bytes_stay_when_memory_is_short(world, declared):
    client, data = await world.client(), png(num_bytes=1_500_000)
    leased = await put(client, data, declared=declared)
    world.fill()
    assert await use(client, leased.hash) == data
    assert (leased.modality, leased.media_type, leased.num_bytes) == ("image", "image/png", len(data))
    assert (leased.width, leased.height, leased.remaining_s) == (60, 40, 3600.0)
    assert world.leases.stats.num_bytes == len(data)


async def test_expired_lease_frees_its_bytes_and_is_unknown(world):
    client = await world.client()
    leased = await put(client, png(), ttl_s=50.0)
    world.clock.now += 49
    assert (await ask(client, "find", leased.hash)).remaining_s == pytest.approx(1)
    world.clock.now += 1
    for call in (use(client, leased.hash), ask(client, "find", leased.hash), ask(client, "renew", leased.hash)):
        with pytest.raises(UnknownMedia) as raised:
            await call
    assert world.leases.stats.num_leases == world.leases.stats.num_bytes == world.arena.stats().num_leases == 0
    with pytest.raises(UnknownMedia) as raised:
        await use(client, leased.hash)
    assert raised.value.param == "messages[0]"


async def test_lease_ends_by_itself(make_world):
    world = await make_world(clock=time.monotonic)
    await put(await world.client(), png(), ttl_s=0.05)
    assert world.arena.stats().num_leases == 1
    await eventually(lambda: world.arena.stats().num_leases == 0)


@pytest.mark.parametrize("way", ["renew", "put"])
async def test_renewed_lease_ends_later(world, way):
    client = await world.client()
    leased = await put(client, png(), ttl_s=50.0)
    world.clock.now += 40
    again = await (ask(client, "renew", leased.hash, ttl_s=60.0) if way == "renew" else put(client, png(), ttl_s=60.0))
    assert (again.hash, again.remaining_s) == (leased.hash, 60.0)
    world.clock.now += 59
    await use(client, leased.hash)
    assert world.leases.stats.num_leases == 1
    world.clock.now += 1
    with pytest.raises(UnknownMedia):
        await use(client, leased.hash)


async def test_deleted_lease_is_unknown(world):
    client = await world.client()
    leased = await put(client, png())
    await ask(client, "end", leased.hash)
    for call in (use(client, leased.hash), ask(client, "end", leased.hash)):
        with pytest.raises(UnknownMedia):
            await call
    assert world.arena.stats().num_leases == 0


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3600.5, float("inf"), float("nan")])
async def test_ttl_outside_the_setting_is_refused_before_the_media_are_sent(world, ttl_s):
    client = await world.client()
    with pytest.raises(InvalidRequest) as raised:
        await put(client, b"never sent", ttl_s=ttl_s)
    assert raised.value.param == "ttl"
    assert world.leases.stats.num_bytes == 0


async def test_lease_of_another_tenant_is_unknown_also_with_the_same_bytes(world):
    client = await world.client()
    leased = await put(client, png())
    for media in (leased.hash, content_hash(png())):
        for call in (use(client, media, OTHER), ask(client, "find", media, OTHER), ask(client, "end", media, OTHER)):
            with pytest.raises(UnknownMedia):
                await call
    others = await put(client, png(), OTHER)
    assert others.hash != leased.hash
    await ask(client, "end", leased.hash)
    assert await use(client, others.hash, OTHER) == png()


async def test_media_sent_with_a_salt_are_known_with_that_salt_only(world):
    client = await world.client()
    salted, plain = await put(client, png(1), salt="a"), await put(client, png(2))
    assert await use(client, salted.hash, salt="a") == png(1)
    assert await use(client, plain.hash, salt="a") == png(2)
    for salt in ("", "b"):
        with pytest.raises(UnknownMedia):
            await use(client, salted.hash, salt=salt)


async def test_leases_are_bounded_in_total_and_for_each_tenant(world):
    """A quarter of 16 MiB, half of that for a tenant."""
    client, size = await world.client(), MIB
    for seed in range(2):
        await put(client, png(seed, size))
    with pytest.raises(MediaLeasesFull, match="API key"):
        await put(client, png(3, size))
    with pytest.raises(MediaTooLarge):
        await put(client, png(3, 2 * MIB + 1))
    await put(client, png(3, size), "of no tenant")
    await put(client, png(4, size - 500), "of no tenant")
    with pytest.raises(MediaLeasesFull) as raised:
        await put(client, png(5, size), OTHER)
    assert raised.value.retry_after_s == 120
    await put(client, png(6), OTHER)
    assert world.leases.stats.num_leases == 5


async def test_tiny_leases_of_a_tenant_leave_others_their_share(make_world):
    world = await make_world(max_leases=8)
    client = await world.client()
    leased = [await put(client, png(seed)) for seed in range(4)]
    with pytest.raises(MediaLeasesFull, match="API key would be more than 4"):
        await put(client, b"never sent")
    for seed in range(4, 8):
        await put(client, png(seed), OTHER)
    await ask(client, "end", leased[0].hash)
    await put(client, png(9))
    assert world.leases.stats.num_leases == 8
    await world.replace_store()
    await client.link.ready()
    assert world.leases.stats.num_leases == 8
    with pytest.raises(MediaLeasesFull, match="API key"):
        await put(client, b"never sent")


async def test_tiny_leases_leave_entries_of_the_arena_to_others(make_world):
    """However small they are, and whoever has them."""
    world = await make_world(media_lease_share=4.5 / 1086)
    client = await world.client()
    for seed in range(4):
        await put(client, png(seed), "of no tenant")
    with pytest.raises(MediaLeasesFull, match="is full"):
        await put(client, png(4), "of no tenant")


async def test_media_of_unknown_length_are_bounded(make_world):
    world = await make_world(media_lease_share=0.1)
    with pytest.raises(MediaTooLarge):
        await put(await world.client(), png(0, 3 * MIB), "owner", declared=False)
    assert world.leases.stats.num_bytes == world.arena.stats().num_reservations == 0


async def test_modality_is_found_out_and_duration_is_measured(world):
    client = await world.client()
    leased = await put(client, WAV)
    assert (leased.modality, leased.media_type, leased.duration_s) == ("audio", "audio/wav", 0.002)
    assert await use(client, leased.hash, modality="audio") == WAV


@pytest.mark.parametrize(
    ("data", "modality", "error"),
    [
        (b"no media", None, InvalidUpload),
        (b"", None, InvalidUpload),
        (png()[:20], None, InvalidImage),
        (WAV, "image", InvalidRequest),
        (b"\x89PNG", "image", InvalidImage),
    ],
)
async def test_what_is_no_media_is_refused_and_freed(world, data, modality, error):
    with pytest.raises(error):
        await put(await world.client(), data, declared=False, modality=modality)
    assert world.leases.stats.num_bytes == world.arena.stats().num_entries == 0


async def test_damaged_media_that_only_a_preparer_detects_are_refused(world):
    world.pool.finds_damage = True
    with pytest.raises(InvalidImage):
        await put(await world.client(), WAV)
    assert world.arena.stats().num_entries == 0


async def test_media_are_used_as_another_modality_only_if_they_are_of_it(world):
    client = await world.client()
    leased = await put(client, png())
    with pytest.raises(InvalidRequest):
        await use(client, leased.hash, modality="audio")
    await eventually(lambda: world.arena.stats().num_leases == 1)


async def test_uuid_names_what_was_sent(world):
    client = await world.client()
    alias = Alias("picture", "", owner="key")
    await put(client, png(1), alias=alias)
    ref = MediaRef("image", "p", alias=Alias("picture", "image", owner="key"))
    found = await client.link.call(lambda call_id: ResolveAlias(call_id, ref))
    assert found.ref.content == content_hash(png(1))
    other = MediaRef("image", "p", alias=Alias("picture", "image", owner="another key"))
    with pytest.raises(UnknownMediaUuid):
        await client.link.call(lambda call_id: ResolveAlias(call_id, other))
    with pytest.raises(UuidConflict):
        await put(client, png(2), alias=alias)
    assert world.leases.stats.num_leases == 1
    assert world.arena.stats().num_entries == 2  # the bytes are not to blame


async def test_next_store_keeps_the_leases_of_a_killed_one(world):
    client = await world.client()
    kept, short = await put(client, png(1), ttl_s=100.0), await put(client, png(2), ttl_s=10.0)
    deleted = await put(client, png(3))
    await ask(client, "end", deleted.hash)
    world.clock.now += 20
    await world.replace_store()
    await eventually(lambda: world.arena.stats().num_leases == 1)
    world.fill()
    assert await use(client, kept.hash) == png(1)
    assert (await ask(client, "find", kept.hash)).remaining_s == pytest.approx(80)
    for lost in (short, deleted):
        with pytest.raises(UnknownMedia):
            await use(client, lost.hash)
    assert world.leases.stats.num_bytes == len(png(1))


async def test_longest_description_is_kept_for_the_next_store(world):
    """Of the largest sizes that there may be; a record has a fixed size."""
    client = await world.client()
    world.pool.size = MediaSize(metadata=b'{"duration":123456.789012}', width=2**31, height=2**31)
    kept = await put(client, MATROSKA, modality="video")
    assert (kept.media_type, kept.width, kept.duration_s) == ("video/x-matroska", 2**31, 123456.789012)
    await world.replace_store()
    assert (await ask(client, "find", kept.hash)) == kept


async def test_next_store_with_smaller_bounds_keeps_what_ends_last(world):
    client = await world.client()
    short, kept = await put(client, png(1, MIB), ttl_s=10.0), await put(client, png(2, MIB), ttl_s=20.0)
    world.config = StoreConfig(media_lease_share=0.1, media_lease_tenant_share=1.0, media_lease_ttl_s=5.0)
    await world.replace_store()
    assert (await ask(client, "find", kept.hash)).remaining_s == 5.0
    with pytest.raises(UnknownMedia):
        await ask(client, "find", short.hash)


async def test_upload_of_a_client_that_is_lost_leaves_nothing(world):
    client = await world.client()
    reached = asyncio.Event()

    async def stall(question):
        reached.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(client.link.call(lambda call_id: PutMedia(call_id, OWNER, "", 1000, 10.0), stall))
    await reached.wait()
    assert world.leases.stats.num_bytes == 1000
    call.cancel()
    await asyncio.wait([call])
    await eventually(lambda: world.leases.stats.num_bytes == world.arena.stats().num_reservations == 0)
