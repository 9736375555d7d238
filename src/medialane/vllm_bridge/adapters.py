"""LoRA adapters that are loaded at run time.

An operator loads an adapter through one gateway, and any request that names it may go to any worker: to one that was
started later, or that was lost when the adapter was loaded. vLLM's engine would load it by itself when the request is
scheduled, and die where it cannot. So a worker asks its engine to load an adapter that it has not seen before the
request goes there: then the request alone fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from vllm.lora.request import LoRARequest

from medialane.core.errors import GenerationFailed
from medialane.core.hashing import content_hash

#: Adapters' numbers are positive 32-bit integers in vLLM's kernels.
_MAX_ID = (1 << 31) - 1


def with_own_id(lora: LoRARequest) -> LoRARequest:
    """The request with a number that follows from name and path. vLLM's app counts from 1, again after each start and
    in each gateway; an engine takes equal numbers for the same adapter."""
    number = int(content_hash(f"{lora.lora_name}\0{lora.lora_path}".encode())[:16], 16) % _MAX_ID + 1
    return msgspec.structs.replace(lora, lora_int_id=number)


class LoadedAdapters:
    """The adapters that an engine has loaded at least once; `load` asks it to, and raises MedialaneError."""

    def __init__(self, load: Callable[[LoRARequest], Awaitable[object]]) -> None:
        self._load = load
        self._known: set[tuple[int, str]] = set()

    async def ensure(self, lora: LoRARequest | None) -> None:
        """Return when the engine can use `lora`. Raises GenerationFailed if it cannot, WorkerLost when it dies."""
        if lora is None or (lora.lora_int_id, lora.lora_path) in self._known:
            return
        try:
            await self._load(lora)
        except GenerationFailed as error:
            raise GenerationFailed(f"the LoRA adapter {lora.lora_name!r} cannot be loaded by the worker") from error
        self._known.add((lora.lora_int_id, lora.lora_path))
