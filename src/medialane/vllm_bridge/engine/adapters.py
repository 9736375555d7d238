"""LoRA adapters that are loaded at run time.

An operator loads an adapter through one gateway, and requests that name it may be routed to any worker, including one
that was started later or was unreachable at that time. vLLM's engine would load the adapter when the request is
scheduled, and crash if it cannot. So a worker makes its engine load an adapter that it has not seen before it submits
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
    """The adapters that an engine has loaded at least once. `load` loads one, and raises MedialaneError."""

    def __init__(self, load: Callable[[LoRARequest], Awaitable[object]]) -> None:
        self._load = load
        self._known: set[tuple[int, str]] = set()

    async def ensure(self, lora: LoRARequest | None) -> None:
        """Return when the engine can use `lora`. Raises GenerationFailed if it cannot, WorkerLost if it dies."""
        if lora is None or (lora.lora_int_id, lora.lora_path) in self._known:
            return
        try:
            await self._load(lora)
        except GenerationFailed as error:
            raise GenerationFailed(f"the LoRA adapter {lora.lora_name!r} cannot be loaded by the worker") from error
        self._known.add((lora.lora_int_id, lora.lora_path))
