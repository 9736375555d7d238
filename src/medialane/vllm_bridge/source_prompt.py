"""Stage `url`: the worker decodes and processes media itself, by vLLM's own renderer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import ClientError
from vllm.config import ModelConfig
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import BaseRenderer

from medialane.core.errors import InvalidImage, MediaFetchFailed, PromptRejected
from medialane.core.request import EngineRequest, SourceItem, SourcePrompt
from medialane.vllm_bridge.preparation import decode_options

#: Threads that decode images. vLLM's processor, which follows, has one thread: more would only wait for it.
NUM_DECODERS = 2


class SourceRenderer:
    """Turns source prompts into vLLM's engine inputs. The owner calls `close`."""

    def __init__(self, renderer: BaseRenderer, model_config: ModelConfig) -> None:
        self._renderer = renderer
        self._executor = ThreadPoolExecutor(NUM_DECODERS, "medialane-source")
        self._io_options: Mapping[str, Mapping[str, Any]] = {}
        if model_config.multimodal_config is not None:
            self._io_options = model_config.multimodal_config.media_io_kwargs
        self._connector = MediaConnector(
            media_io_kwargs=dict(self._io_options), allowed_media_domains=model_config.allowed_media_domains
        )

    async def render(self, request: EngineRequest, prompt: SourcePrompt) -> Any:
        """vLLM's engine input: the prompt expanded, its items processed and known by the mm_hash given.

        Raises PromptRejected, InvalidImage or MediaFetchFailed. Cancelled, it leaves a decode running to its end.
        """
        media, hashes = await self._media(prompt)
        tokens = {
            "prompt_token_ids": prompt.token_ids,
            "multi_modal_data": media,
            "multi_modal_uuids": hashes,
            "mm_processor_kwargs": decode_options(prompt.options),
            **({} if request.prompt_text is None else {"prompt": request.prompt_text}),
            **({} if request.cache_salt is None else {"cache_salt": request.cache_salt}),
        }
        try:
            (rendered,) = await self._renderer.render_cmpl_async([tokens])
        except VLLMError:
            raise
        except (ValueError, TypeError, AssertionError) as error:
            # Too many items, options that the processor does not take, a prompt without the items' placeholders.
            raise PromptRejected(str(error)) from error
        # vLLM hashes a uuid again when there are options; ours has them in it already, as in stage `features`.
        return {**rendered, "mm_hashes": hashes} if media else rendered

    async def _media(self, prompt: SourcePrompt) -> tuple[dict[str, list[Any]], dict[str, list[str]]]:
        media: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        for item in prompt.items:
            media.setdefault(item.modality, []).append(await self._load(item))
            hashes.setdefault(item.modality, []).append(item.mm_hash)
        return media, hashes

    async def _load(self, item: SourceItem) -> Any:
        if item.modality != "image":
            raise PromptRejected(f"{item.modality} is not supported by this worker")
        if item.data is None:
            return await self._fetch(item.url or "", item.param)
        image_io = ImageMediaIO(**{"image_mode": "RGB", **self._io_options.get("image", {})})
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, image_io.load_bytes, item.data)
        except ValueError as error:
            raise InvalidImage("the image cannot be decoded", param=item.param) from error

    async def _fetch(self, url: str, param: str | None) -> Any:
        try:
            return await self._connector.fetch_image_async(url)
        except VLLMError:
            raise
        except (ClientError, OSError, ValueError, RuntimeError) as error:
            raise MediaFetchFailed("the image cannot be fetched by the worker", param=param) from error

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
