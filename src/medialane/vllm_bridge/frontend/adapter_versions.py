"""Which version of each LoRA adapter the requests of this gateway get: that of its files when it was loaded."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest

from medialane.types.admin import AddLora, UnloadLora
from medialane.types.errors import AdminCallIncomplete, GenerationFailed, MedialaneError, NotFound
from medialane.vllm_bridge.engine.adapters import versioned
from medialane.vllm_bridge.frontend.request_backend import RequestBackend

logger = logging.getLogger(__name__)


class AdapterVersions:
    """Has workers load and unload adapters. They read the files, which may be on their hosts only, and return the
    version. A worker that was not connected loads the version
    with the first request that names it."""

    def __init__(self, backend: RequestBackend, encode: Callable[[Any], bytes]) -> None:
        self._backend = backend
        self._encode = encode
        #: By name; None for adapters of the command line until their first request: no worker is ready before.
        self._versions: dict[str, str | None] = {}
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def load_later(self, lora: LoRARequest) -> None:
        """Load it with the first request that names it."""
        self._versions[lora.lora_name] = None

    async def load(self, lora: LoRARequest) -> None:
        """Load an adapter as its files are now. If that fails anywhere, the version until now stays. Raises
        MedialaneError."""
        async with self._changing[lora.lora_name]:
            await self._load(lora)

    async def unload(self, name: str) -> None:
        """Raises MedialaneError: it is still loaded then."""
        async with self._changing[name]:
            await self._backend.administer(UnloadLora(name))
            self._versions.pop(name, None)

    async def of(self, lora: LoRARequest) -> LoRARequest:
        """Return the request of a worker for the adapter that a request of the app names. Raises GenerationFailed,
        NoWorkerReady, NotFound if it has been unloaded meanwhile."""
        if self._versions.get(lora.lora_name, "") is None:
            await self._load_first(lora)
        version = self._versions.get(lora.lora_name)
        if version is None:
            raise NotFound(f"The LoRA adapter `{lora.lora_name}` has been unloaded.", param="model")
        return versioned(lora, version)

    async def _load_first(self, lora: LoRARequest) -> None:
        name = lora.lora_name
        async with self._changing[name]:
            if self._versions.get(name, "") is not None:
                return
            try:
                await self._load(lora)
            except AdminCallIncomplete as error:  # its message is for operators, and logged
                raise GenerationFailed(f"the LoRA adapter {name!r} cannot be loaded by the workers") from error

    async def _load(self, lora: LoRARequest) -> None:
        name, previous = lora.lora_name, self._versions.get(lora.lora_name)
        try:
            versions = {str(version) for version in await self._backend.administer(AddLora(self._encode(lora)))}
            if len(versions) != 1:
                raise AdminCallIncomplete(
                    f"the workers have read different files of the LoRA adapter {name!r} at {lora.lora_path}: "
                    "load it once they are equal on all hosts"
                )
        except MedialaneError:
            await self._keep(name, previous or "")
            raise
        (version,) = versions
        self._versions[name] = version
        await self._keep(name, version)

    async def _keep(self, name: str, version: str) -> None:
        """Unload the other versions. Where that fails, they only use memory."""
        try:
            await self._backend.administer(UnloadLora(name, version))
        except MedialaneError as error:
            logger.warning("other versions of the LoRA adapter %r are not unloaded: %s", name, error.message)
