"""Pools with real processes, a real arena and the fake processor, and ways to look at processes."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from PIL import Image as PILImage

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Pin
from medialane.media import MediaConfig
from medialane.prepare import (
    PrepareConfig,
    PreparerPool,
    ProcessorSource,
    forkserver,
    forkserver_process,
    prebuild_processor,
)
from medialane.prepare import fork_forkserver as fork_prebuilt
from medialane.types.hashing import content_hash
from medialane.types.media import EncodedMedia

FACTORY = "medialane.testing.fake_processor:build_processor"


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie that an init process has yet to collect."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def forkserver_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children() -> set[int]:
    """Child processes of this one."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def put(arena: Arena, data: bytes) -> Pin[EncodedMedia]:
    reservation = arena.reserve(len(data), "encoded")
    reservation.buffer[:] = data
    encoded = EncodedMedia("image", content_hash(data), "image/png", reservation.range, ENTRY_HEADER_BYTES, len(data))
    return arena.publish(reservation, encoded.content_hash, encoded)


@contextlib.contextmanager
def _with_threads() -> Iterator[None]:
    """A process of tests has threads, at the fork of a fork server, which has none."""
    here, check, modules = os.getpid(), forkserver_process.require_one_thread, (forkserver_process, forkserver)
    for module in modules:
        module.require_one_thread = lambda: check() if os.getpid() != here else None
    try:
        yield
    finally:
        for module in modules:
            module.require_one_thread = check
        gc.unfreeze()


def fork_forkserver(factory: str, factory_config: bytes, environment: Mapping[str, str]) -> None:
    """Build a processor and fork a fork server with it, as for a store whose parent has built it."""
    with _with_threads():
        prebuild_processor(ProcessorSource(factory, factory_config, environment))
        fork_prebuilt()


def make_pool(
    arena: Arena,
    factory_config: bytes = b"{}",
    *,
    on_loaded: Callable[[], None] = lambda: None,
    **settings: object,
) -> PreparerPool:
    config = PrepareConfig(**{"num_preparers": 1, "image_timeout_s": 5.0, "start_timeout_s": 60.0, **settings})
    return PreparerPool(
        config,
        factory=FACTORY,
        factory_config=factory_config,
        arena=arena,
        media=MediaConfig(),
        environment=os.environ,
        on_loaded=on_loaded,
    )


@contextlib.asynccontextmanager
async def running(pool: PreparerPool, fork: Callable[[], None] = lambda: None) -> AsyncIterator[PreparerPool]:
    """Start the pool; first `fork` its fork server, unless it is to be exec'ed."""
    before = children()
    fork()
    await pool.start()
    pids = pool.preparer_pids
    try:
        yield pool
    finally:
        pids += pool.preparer_pids
        await pool.close()
    assert children() == before
    assert not [pid for pid in pids if is_running(pid)]
