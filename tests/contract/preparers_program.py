"""`preparers_program.py MODEL`: prepare an image and a video with vLLM's processor, in preparers of a forked fork
server and of one that is exec'ed. Prints JSON: for each, the digests of what was made, and facts of its processes."""

import asyncio
import json
import os
import sys
import threading
import time

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig
from medialane.cli.store import PROCESSOR_FACTORY
from medialane.media import MediaConfig
from medialane.prepare import (
    FactoryConfig,
    PrepareConfig,
    PreparerPool,
    ProcessorSource,
    fork_forkserver,
    prebuild_processor,
)
from medialane.runtime.linux import exit_at_once
from medialane.testing.sample_media import sample_jpeg, sample_video
from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from medialane.types.hashing import content_hash
from medialane.types.media import EncodedMedia

MEDIA = (
    ("image", "image/jpeg", sample_jpeg(1, 320, 240), b"{}"),
    ("image", "image/jpeg", sample_jpeg(2, 64, 512), b'{"max_pixels":50176}'),
    ("video", "video/mp4", sample_video(3), b"{}"),
)


async def made_by(config, arena):
    pool = PreparerPool(
        PrepareConfig(num_preparers=1),
        factory=PROCESSOR_FACTORY,
        factory_config=config,
        arena=arena,
        media=MediaConfig(),
        environment=dict(os.environ),
    )
    is_prebuilt, started = pool.is_prebuilt, time.monotonic()
    await pool.start()
    ready_s = time.monotonic() - started
    try:
        digests = [await digest(pool, arena, number, *media) for number, media in enumerate(MEDIA)]
        (pid,) = pool.preparer_pids
        return {
            "made": [digests, dict(pool.processor_settings)],
            "is_prebuilt": is_prebuilt,
            "ready_s": ready_s,
            "num_threads": len(os.listdir(f"/proc/{pid}/task")),
        }
    finally:
        await pool.close()


async def digest(pool, arena, number, modality, media_type, data, options):
    reservation = arena.reserve(len(data), "encoded")
    reservation.buffer[:] = data
    value = EncodedMedia(modality, content_hash(data), media_type, reservation.range, ENTRY_HEADER_BYTES, len(data))
    with arena.publish(reservation, value.content_hash, value) as encoded:
        pin = await pool.prepare_item(encoded, options, f"{number:064}")
    with pin:
        tensors = [content_hash(bytes(arena.view.tensor(tensor))) for tensor in pin.value.tensors]
        return [content_hash(pin.value.header), *tensors]


def main(model):
    config = msgspec.json.encode(FactoryConfig(model, list(TINY_MODEL_FLAGS)))
    prebuild_processor(ProcessorSource(PROCESSOR_FACTORY, config, dict(os.environ)))
    fork_forkserver()
    results = []
    for _ in range(2):
        arena = Arena.create(ArenaConfig(size_bytes=64 << 20))
        arena.prefault(threading.Event())
        results.append(asyncio.run(made_by(config, arena)))
        arena.close()
    sys.stdout.write(f"\n{json.dumps(results)}\n")
    exit_at_once(0)


if __name__ == "__main__":
    main(sys.argv[1])
