"""LoRA adapters that are loaded at run time.

An operator loads an adapter through one gateway, and requests that name it may be routed to any worker, including one
that was started later or was unreachable at that time. vLLM's engine would load the adapter when the request is
scheduled, and crash if it cannot. So a worker makes its engine load an adapter that it may not have before it submits
the request: a failure then affects only that request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from vllm.lora.request import LoRARequest

from medialane.core.errors import GenerationFailed
from medialane.core.hashing import content_hash

#: LoRA ids are positive 32-bit integers in vLLM's kernels.
_MAX_ID = (1 << 31) - 1


def with_own_id(lora: LoRARequest) -> LoRARequest:
    """Return the request with an id derived from name and path. vLLM's app counts from 1 after each start and in each
    gateway, but an engine treats equal ids as the same adapter."""
    number = int(content_hash(f"{lora.lora_name}\0{lora.lora_path}".encode())[:16], 16) % _MAX_ID + 1
    return msgspec.structs.replace(lora, lora_int_id=number)


class LoadedAdapters:
    """The adapters that an engine surely has. `load` has it load one, unless it has it, and raises MedialaneError.

    An engine has room for `capacity` adapters, and evicts one for each further. Which one depends on the order in which
    it has run requests; so once there were more, it is asked before each request: a message between two of its steps.
    """

    def __init__(self, load: Callable[[LoRARequest], Awaitable[object]], *, capacity: int) -> None:
        self._load = load
        self._capacity = capacity
        self._loaded: set[tuple[int, str]] = set()

    async def ensure(self, lora: LoRARequest | None) -> None:
        """Return when the engine can use `lora`. Raises GenerationFailed if it cannot, WorkerLost if it dies."""
        if lora is None:
            return
        key = lora.lora_int_id, lora.lora_path
        has_evicted = len(self._loaded) > self._capacity
        if key in self._loaded and not has_evicted:
            return
        try:
            await self._load(lora)
        except GenerationFailed as error:
            raise GenerationFailed(f"the LoRA adapter {lora.lora_name!r} cannot be loaded by the worker") from error
        if not has_evicted:
            self._loaded.add(key)
