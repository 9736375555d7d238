"""LoRA adapters of one engine, each in the version that a gateway has loaded.

The files at an adapter's path may be replaced at any time (trainers do), while vLLM's engine knows an adapter by its
id, its caches know it by its name, and the engine reads the files again whenever it needs an adapter that it has
evicted (by default it keeps one). So an adapter is identified by its content: a *version* is the digest of the files
that vLLM reads, it is part of the engine's name of the adapter (`NAME@VERSION`), and with that of its id, of block
hashes, KV events and keys of the encoder cache. The engine reads a private copy of the files, which exists for as long
as a request may need it.

Requests name the version that their gateway has loaded. A worker without it (it was started later) reads the path
again, and refuses the request if other files are there now.

Administrative calls, executed by vLLM's AsyncLLM and by what an engine knows of its adapters.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.async_llm import AsyncLLM

from medialane.types import admin
from medialane.types.admin import AdminCall
from medialane.types.errors import AdapterChanged, GenerationFailed, MedialaneError
from medialane.types.hashing import content_hash
from medialane.vllm_bridge.engine.engine_request import readable
from medialane.vllm_bridge.seams.engine import MsgpackDecoder

logger = logging.getLogger(__name__)

#: LoRA ids are positive 32-bit integers in vLLM's kernels.
_MAX_ID = (1 << 31) - 1

#: What vLLM reads of an adapter: its configuration, and the first of these that exists.
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")

_CHUNK_BYTES = 8 << 20


def versioned(lora: LoRARequest, version: str) -> LoRARequest:
    """Return the request as the engine gets it. vLLM's app counts ids from 1 after each start and in each gateway, but
    an engine treats equal ids as the same adapter, and requests of equal names in one batch as one."""
    name = f"{lora.lora_name}@{version}"
    number = int(content_hash(name.encode())[:16], 16) % _MAX_ID + 1
    return msgspec.structs.replace(lora, lora_name=name, lora_int_id=number, load_inplace=False)


def plain_name(versioned_name: str) -> str:
    """Return the name by which clients know an adapter."""
    return versioned_name.rpartition("@")[0]


@dataclass(eq=False)
class _Adapter:
    lora: LoRARequest
    copy: Path
    num_requests: int = 0
    is_unloaded: bool = False


class Adapters:
    """The adapters that an engine has: `load` and `remove` are its calls, which raise MedialaneError. Copies are in
    `folder`, whose owner removes it; an engine that runs on several hosts `reads_path` itself."""

    def __init__(
        self,
        folder: Path,
        *,
        load: Callable[[LoRARequest], Awaitable[object]],
        remove: Callable[[int], Awaitable[object]],
        reads_path: bool = False,
    ) -> None:
        self._folder = folder
        self._load = load
        self._remove = remove
        self._reads_path = reads_path
        self._loaded: dict[str, _Adapter] = {}  # by versioned name
        self._latest: dict[str, _Adapter] = {}  # by plain name: what was loaded last, through whatever gateway
        self._changing = asyncio.Lock()

    async def add(self, lora: LoRARequest) -> str:
        """Load an adapter as its files are now; return the version. Raises GenerationFailed, WorkerLost."""
        async with self._changing:
            return _version(await self._added(lora))

    async def unload(self, name: str, *, keep: str = "") -> None:
        """Unload all versions of an adapter but `keep`: versions in use after the last of their requests."""
        self._latest.pop(name, None)
        for adapter in self._loaded.values():
            if plain_name(adapter.lora.lora_name) == name:
                adapter.is_unloaded = _version(adapter) != keep
                if not adapter.is_unloaded:
                    self._latest[name] = adapter
        await self._drop_unused()

    @asynccontextmanager
    async def using(self, lora: LoRARequest | None, *, exact: bool = False) -> AsyncIterator[LoRARequest | None]:
        """Have the engine load the version that a request names, and keep it during the context, whose value is the
        request for the engine. If another gateway has replaced that version, it is the latest, unless it must be
        `exact`. Raises AdapterChanged if the adapter's files are others now, GenerationFailed, WorkerLost."""
        if lora is None:
            yield None
            return
        adapter = self._known(lora, exact=exact) or await self._found(lora)
        adapter.num_requests += 1
        try:
            yield adapter.lora
        finally:
            adapter.num_requests -= 1
            if adapter.is_unloaded and not adapter.num_requests:
                try:
                    await self._drop_unused()
                except MedialaneError as error:  # the request has its answer, and `ping` finds an engine that is lost
                    logger.warning("the engine has not unloaded %s: %s", adapter.lora.lora_name, error.message)

    def _known(self, lora: LoRARequest, *, exact: bool) -> _Adapter | None:
        named = self._loaded.get(lora.lora_name)
        if exact or (named is not None and not named.is_unloaded):
            return named
        return self._latest.get(plain_name(lora.lora_name), named)

    async def _found(self, lora: LoRARequest) -> _Adapter:
        async with self._changing:
            if (adapter := self._loaded.get(lora.lora_name)) is not None:
                return adapter
            name = plain_name(lora.lora_name)
            plain = msgspec.structs.replace(lora, lora_name=name)
            try:
                return await self._added(plain, expected=lora.lora_name)
            except GenerationFailed as error:
                raise GenerationFailed(f"the LoRA adapter {name!r} cannot be loaded by the worker") from error

    async def _added(self, lora: LoRARequest, *, expected: str = "") -> _Adapter:
        """Load the files as they are now, if they belong to the versioned name `expected`."""
        copy = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="adapter-", dir=self._folder))
        loaded = False
        try:
            version = await asyncio.to_thread(_read, lora, None if self._reads_path else copy)
            request = versioned(lora, version)
            if request.lora_name != (expected or request.lora_name):
                raise AdapterChanged(
                    f"the files of the LoRA adapter {lora.lora_name!r} have changed since it was loaded: load it again"
                )
            known = self._loaded.get(request.lora_name)
            if known is not None:
                known.is_unloaded = False
                return known
            if not self._reads_path:
                request = msgspec.structs.replace(request, lora_path=str(copy))
            try:
                await self._load(request)
            except GenerationFailed as error:
                raise GenerationFailed(_about(error.message, request, lora)) from error
            self._loaded[request.lora_name] = adapter = _Adapter(request, copy)
            loaded = True
            return adapter
        finally:
            if not loaded:
                await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def _drop_unused(self) -> None:
        async with self._changing:
            for name, adapter in list(self._loaded.items()):
                if adapter.is_unloaded and not adapter.num_requests:
                    del self._loaded[name]  # first: from now on, a request that names it waits for the lock
                    try:
                        await self._remove(adapter.lora.lora_int_id)
                    finally:
                        await asyncio.to_thread(shutil.rmtree, adapter.copy, ignore_errors=True)


def _version(adapter: _Adapter) -> str:
    return adapter.lora.lora_name.rpartition("@")[2]


def _about(message: str, request: LoRARequest, lora: LoRARequest) -> str:
    """Return vLLM's message about the adapter of a client: with its own name and path."""
    return message.replace(request.lora_path, lora.lora_path).replace(request.lora_name, lora.lora_name)


def _read(lora: LoRARequest, copy: Path | None) -> str:
    """Return the version of an adapter's files, which are copied into `copy`. Blocks. Raises GenerationFailed."""
    source = Path(get_adapter_absolute_path(lora.lora_path))
    paths = [source / _CONFIG, *[path for name in _WEIGHTS if (path := source / name).is_file()][:1]]
    if not paths[0].is_file():
        raise GenerationFailed(str(LoRAAdapterNotFoundError(lora.lora_name, lora.lora_path)))
    version = blake3(str(lora.is_3d_lora_weight).encode())
    try:
        before = _states(paths)
        for path in paths:
            _hash_and_copy(path, version, copy)
        if _states(paths) != before:
            raise GenerationFailed(
                f"the files of the LoRA adapter {lora.lora_name!r} at {lora.lora_path} change while they are read: "
                "load it once they are written"
            )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GenerationFailed(f"the LoRA adapter at {lora.lora_path} cannot be read or copied: {reason}") from error
    return version.hexdigest()[:16]


def _states(paths: Sequence[Path]) -> list[tuple[int, ...]]:
    """Return what changes when a file is written or replaced."""
    states = [os.stat(path) for path in paths]
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in states]


def _hash_and_copy(path: Path, version: blake3, copy: Path | None) -> None:
    version.update(f"{path.name} {path.stat().st_size} ".encode())
    with path.open("rb") as source, open(os.devnull if copy is None else copy / path.name, "wb") as target:
        while chunk := source.read(_CHUNK_BYTES):
            version.update(chunk)
            target.write(chunk)


_LORA = MsgpackDecoder(LoRARequest)


def _add_lora(adapters: Adapters, call: admin.AddLora) -> Awaitable[str]:
    with readable("LoRA request"):
        lora = _LORA.decode(call.lora)
    return adapters.add(lora)


#: Makes the engine execute a call of each type. Awaiting the result raises what vLLM raises; a LoRA request that cannot
#: be decoded raises PromptRejected.
ACTIONS: dict[type[AdminCall], Callable[[AsyncLLM, Any], Awaitable[bool | None]]] = {
    admin.ResetPrefixCache: lambda llm, call: llm.reset_prefix_cache(call.reset_running_requests, call.reset_connector),
    admin.ResetMmCache: lambda llm, _: llm.reset_mm_cache(),
    admin.ResetEncoderCache: lambda llm, _: llm.reset_encoder_cache(),
    admin.Sleep: lambda llm, call: llm.sleep(call.level, call.mode),
    admin.ReleaseKvCacheMemory: lambda llm, _: llm.release_kv_cache_memory(),
    admin.WakeUp: lambda llm, call: llm.wake_up(None if call.tags is None else list(call.tags)),
    admin.IsSleeping: lambda llm, _: llm.is_sleeping(),
    admin.PauseGeneration: lambda llm, call: llm.pause_generation(mode=call.mode, clear_cache=call.clear_cache),
    admin.ResumeGeneration: lambda llm, _: llm.resume_generation(),
    admin.IsPaused: lambda llm, _: llm.is_paused(),
    admin.StartProfile: lambda llm, call: llm.start_profile(
        call.profile_prefix, delay_iterations=call.delay_iterations, max_iterations=call.max_iterations
    ),
    admin.StopProfile: lambda llm, _: llm.stop_profile(),
}

ADAPTER_ACTIONS: dict[type[AdminCall], Callable[[Adapters, Any], Awaitable[str | None]]] = {
    admin.AddLora: _add_lora,
    admin.UnloadLora: lambda adapters, call: adapters.unload(call.name, keep=call.keep),
}
