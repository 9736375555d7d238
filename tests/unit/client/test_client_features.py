"""Tensors of a host's store for other programs: views without a copy, held within a block."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from medialane import client
from medialane.arena import describe, layout
from medialane.store import PinnedItem, StoreServer, StoreStatus
from medialane.store.embeddings import Embeddings
from medialane.transfer import Pulls
from medialane.types.errors import InvalidRequest, UnknownMedia
from medialane.types.feature import Batched, Feature, Field, HeaderFields, LargeTensor, Nested, Scalar, SmallTensor
from medialane.types.media import MediaSize
from medialane.types.stats import PoolStats, StoreStats
from medialane.types.tensor import TensorSpec
from medialane.wire import RpcConfig
from waiting import eventually

RPC = RpcConfig()
IDLE = PoolStats(0, 0, 0, 0, 0, 0, 0, 0)
PIXELS = torch.linspace(-3, 3, 64 * 300).reshape(64, 300).bfloat16()
MASK = torch.arange(30_000) % 3 == 0
KNOWN, OTHER = "a" * 64, "b" * 64


def raw(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


HEADER = msgspec.msgpack.encode(
    HeaderFields(
        [
            Field("pixel_values", Batched(), LargeTensor(0, TensorSpec("bfloat16", (64, 300)))),
            Field("grid", Batched(), SmallTensor(TensorSpec("int64", (3,)), raw(torch.tensor([1, 8, 8])))),
            Field("masks", Batched(), Nested([LargeTensor(1, TensorSpec("bool", (30_000,))), Scalar(7)])),
            Field("empty", Batched(), SmallTensor(TensorSpec("float32", (0, 4)), b"")),
        ]
    )
)
SPECS = (TensorSpec("bfloat16", (64, 300)), TensorSpec("bool", (30_000,)))


class OneFeature:
    """Replaces `Items`: it knows one feature."""

    def __init__(self, arena):
        self._arena, self.embeddings = arena, Embeddings(arena)

    async def feature(self, mm_hash):
        if mm_hash != KNOWN:
            raise UnknownMedia("unknown or expired feature")
        pin = self._arena.lookup(mm_hash)
        return PinnedItem(mm_hash, pin or self._made(mm_hash), is_hit=pin is not None)

    def _made(self, mm_hash):
        offsets, nbytes = layout(SPECS)
        reservation = self._arena.reserve(nbytes)
        for offset, tensor in zip(offsets, (PIXELS, MASK), strict=True):
            start = offset - offsets[0]
            reservation.buffer[start : start + tensor.nbytes] = raw(tensor)
        feature = Feature("image", mm_hash, HEADER, describe(reservation.range, SPECS), MediaSize())
        return self._arena.publish(reservation, mm_hash, feature)


@pytest.fixture
async def store(arena):
    """The address of a store in this process, for clients in threads."""
    items = OneFeature(arena)
    server = StoreServer(
        items, arena, RPC, pulls=Pulls(arena, RPC), max_connections=4, processor=dict, on_damaged=lambda: None,
        status=lambda: StoreStatus(StoreStats(arena.stats(), IDLE, embeddings=items.embeddings.stats), None, True),
    )  # fmt: skip
    address = f"unix:/tmp/medialane-test-{secrets.token_hex(6)}.sock"
    await server.serve(address)
    yield address
    await server.close()


async def test_fields_are_views_of_the_arena(store, arena):
    def read():
        with client.features([KNOWN, KNOWN], store=store) as features:
            assert list(features) == [KNOWN]
            fields = features[f"medialane:feature/{KNOWN}"]
            assert list(fields) == ["pixel_values", "grid", "masks", "empty"]
            assert torch.equal(fields["pixel_values"], PIXELS)
            assert fields["grid"].tolist() == [1, 8, 8]
            assert torch.equal(fields["masks"][0], MASK)
            assert fields["masks"][1] == 7
            assert fields["empty"].shape == (0, 4)
            return arena.stats().pinned_bytes, arena_mappings(fields["pixel_values"].data_ptr())

    pinned_bytes, mapping = await asyncio.to_thread(read)
    assert pinned_bytes >= PIXELS.nbytes
    assert "medialane" in mapping
    assert mapping.split()[1].startswith("r--")
    await eventually(lambda: not arena.stats().pinned_bytes)


def arena_mappings(address):
    """The line of /proc/self/maps with this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return ""


async def test_nothing_can_be_used_after_the_block(store, arena):
    def read():
        with client.features([KNOWN], store=store) as features:
            fields = features[KNOWN]
            pixels = fields["pixel_values"]
        return features, pixels

    features, pixels = await asyncio.to_thread(read)
    assert pixels.numel() == 0
    for use in (lambda: features[KNOWN], lambda: list(features), lambda: len(features)):
        with pytest.raises(client.FeaturesReleased, match="released at the end of the `with` block"):
            use()
    await eventually(lambda: not arena.stats().pinned_bytes)


async def test_an_error_within_the_block_ends_the_holds(store, arena):
    def fail():
        with client.features([KNOWN], store=store):
            raise RuntimeError("training has failed")

    with pytest.raises(RuntimeError, match="training has failed"):
        await asyncio.to_thread(fail)
    await eventually(lambda: not arena.stats().pinned_bytes)


async def test_unknown_hashes_are_named_and_nothing_stays_held(store, arena):
    def read():
        with client.features([KNOWN, OTHER], store=store):
            pass

    with pytest.raises(client.UnknownMedia, match=OTHER):
        await asyncio.to_thread(read)
    await eventually(lambda: not arena.stats().pinned_bytes)


def held(address, **options):
    with client.features([KNOWN], store=address, **options):
        pass


def test_what_is_no_hash_is_refused_before_anything_is_connected():
    with pytest.raises(InvalidRequest, match="'pixels' is no hash of a feature"), client.features(["pixels"], store=""):
        pass


def test_missing_store_is_reported(tmp_path):
    with pytest.raises(client.StoreUnavailable, match="is medialane running on this host"):
        held(f"unix:{tmp_path}/none.sock")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open any socket")
async def test_socket_of_another_user_is_reported(store):
    os.chmod(store.removeprefix("unix:"), 0)
    with pytest.raises(client.StoreUnavailable, match="only the user who runs the store"):
        await asyncio.to_thread(held, store)


async def test_another_shared_memory_is_reported(store, tmp_path):
    with pytest.raises(client.StoreUnavailable, match="must share the store's /dev/shm"):
        await asyncio.to_thread(held, store, arena_directory=str(tmp_path))


def test_import_loads_no_torch():
    program = "import sys, medialane.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
