"""Encoded bytes in the arena, decoded by the media package in a preparer, tensors read back by a read-only mapping."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image as PILImage

from decoded_media import decode_image
from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaView, Pin
from medialane.media import MediaConfig
from medialane.types.errors import InvalidRequest
from medialane.types.hashing import content_hash
from medialane.types.media import EncodedMedia


def encode(width: int, height: int, file_format: str) -> bytes:
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    pixels = np.stack([x % 256, y % 256, (x + y) % 256], axis=2).astype(np.uint8)
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def put(arena: Arena, data: bytes, media_type: str) -> Pin[EncodedMedia]:
    reservation = arena.reserve(len(data), "encoded")
    reservation.buffer[:] = data
    encoded = EncodedMedia("image", content_hash(data), media_type, reservation.range, ENTRY_HEADER_BYTES, len(data))
    return arena.publish(reservation, encoded.content_hash, encoded)


@pytest.mark.parametrize(("file_format", "media_type"), [("JPEG", "image/jpeg"), ("PNG", "image/png")])
async def test_arena_tensors_equal_those_of_the_decoded_pixels(arena, preparers, file_format, media_type):
    files = [encode(61 + n, 47, file_format) for n in range(6)]
    sources = [put(arena, data, media_type) for data in files]
    jobs = [preparers.prepare_item(source, b'{"scale": 0.5}', f"{n:064}") for n, source in enumerate(sources)]
    pins = await asyncio.gather(*jobs)
    reader = ArenaView.open(arena.id, str(arena.path.parent))
    for data, source, pin in zip(files, sources, pins, strict=True):
        pixels = decode_image(memoryview(data), MediaConfig()).pixels
        tensor = pin.value.tensors[0]
        found = np.frombuffer(reader.tensor(tensor), np.float32).reshape(tensor.spec.shape)
        np.testing.assert_array_equal(found, pixels.astype(np.float32) * np.float32(0.5))
        assert (pin.value.size.width, pin.value.size.height) == (pixels.shape[1], pixels.shape[0])
        del found
        pin.release()
        source.release()
    reader.close()


async def test_corrupt_image_is_a_client_error_and_the_next_is_prepared(arena, preparers):
    whole = encode(640, 480, "JPEG")
    with put(arena, whole[: len(whole) // 3], "image/jpeg") as broken, pytest.raises(InvalidRequest):
        await preparers.prepare_item(broken, b"{}", "a" * 64)
    with put(arena, whole, "image/jpeg") as source:
        (await preparers.prepare_item(source, b"{}", "b" * 64)).release()
    assert preparers.stats().num_restarts == 0
