"""Prompts that arrive unexpanded: this worker processes their media and expands them, with vLLM's own renderer.

In stage `decoded` an item arrives as pixels, frames or samples, which are passed to the renderer in the form of vLLM's
own loaders; in stage `url` it arrives as encoded bytes, which those loaders decode here. Embeddings also arrive in
stage `url`; they replace both media and processor.

*Embeddings sent by clients* (`image_embeds`) are typed (`types.tensor`): vLLM's own loader, which unpickles, is not
used. vLLM then trusts shapes: a grid determines the number of placeholder tokens, and embeddings whose rows do not
match it crash EngineCore with all its requests. So embeddings are checked twice: each item before vLLM gets it, and the
renderer's result against the placeholders. In which form a model accepts them, if in any, is found by a trial at start
(`engine_core.try_embeds`), not by its family.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypedDict

import torch
from vllm.config import ModelConfig
from vllm.exceptions import VLLMError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import BaseRenderer

from medialane.types.errors import (
    InvalidEmbeds,
    InvalidFeature,
    InvalidVideo,
    MedialaneError,
    PromptRejected,
    UnsupportedMediaType,
    raised_in,
)
from medialane.types.feature import MediaPayload
from medialane.types.media import DECODED, MODALITIES, Decoded, MediaSize, Modality, StageName
from medialane.types.request import EngineRequest, UnexpandedPrompt
from medialane.types.tensor import EMBEDS_TYPE, UNNAMED, Embeds, decode_embeds
from medialane.vllm_bridge.engine_errors import engine_fault, public_text
from medialane.vllm_bridge.items.features import tensor_over
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, decode_options
from medialane.vllm_bridge.items.options import model_io
from medialane.vllm_bridge.items.preparation import engine_media, video_io
from medialane.vllm_bridge.items.prepared_input import decoder_input
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.seams.multimodal import embeds_data, processes_items_apart, processor_of, video_backend

logger = logging.getLogger(__name__)

#: Decoder threads. vLLM's processor, the next step, has one thread: more decoders would only wait for it.
NUM_DECODERS = 2

_LOADERS: dict[Modality, Callable[..., Any]] = {
    "image": lambda **options: ImageMediaIO(**{"image_mode": "RGB", **options}),
    "audio": AudioMediaIO,
}


#: Names of an object's members: the embeddings of an image, and its grid of patches.
VALUES, GRID = "image_embeds", "image_grid_thw"

MODALITY = "image"


class AcceptedEmbeds(TypedDict):
    """Sent as msgpack. `fields` are an item's (`UNNAMED`: one tensor with one row per placeholder token); none
    if embeddings are not accepted, and `fault` says why. `width` is a row's."""

    fields: list[str]
    width: int
    fault: str


_GRID_NUMBERS = 3


class UnexpandedRenderer:
    """Converts unexpanded prompts to vLLM's engine inputs. The owner calls `close`."""

    def __init__(self, renderer: BaseRenderer, model_config: ModelConfig, profile: ModelProfile | None = None) -> None:
        """`profile` is None if the model does not support media."""
        self._renderer = renderer
        self._model_config = model_config
        self._profile = profile
        self._checker = None if profile is None else profile.checker
        self._model_io = model_io(model_config)
        self._embeds_reader = None if profile is None else EmbedsReader(profile, None)
        self._executor = ThreadPoolExecutor(NUM_DECODERS, "medialane-source")
        #: The step before vLLM's processor, by stage.
        self._loads: Mapping[StageName, Callable[[MediaPayload, memoryview], Awaitable[Any]]] = {
            "decoded": self._decoded,
            "url": self._encoded,
        }

    def accept_embeds(self, accepted: AcceptedEmbeds) -> None:
        """Accept embeddings of clients in this form. To be called before requests are rendered."""
        if self._profile is not None:
            self._embeds_reader = EmbedsReader(self._profile, accepted)

    async def render(
        self, request: EngineRequest, prompt: UnexpandedPrompt, tensors: Sequence[Sequence[memoryview]]
    ) -> Any:
        """Return vLLM's engine input: the expanded prompt, with processed items identified by the mm_hash given.

        Raises PromptRejected, InvalidImage, InvalidVideo, InvalidAudio, InvalidEmbeds, InvalidFeature for tensors that
        are not valid media, or that the request's options turn into features unsupported by the model, and
        InvalidRequest for options that a worker does not run the processor with. If cancelled, a running decode
        continues to its end.
        """
        processed_here = {item.modality for item in prompt.media if item.media_type != EMBEDS_TYPE}
        if self._checker is not None and processed_here:
            self._checker.check_options(prompt.options, processed_here)
        media, hashes = await self._media(prompt, tensors)
        embedded = {m: data for m, data in media.items() if any(isinstance(item, dict) for item in data)}
        media |= {modality: self._reader().data(modality, items) for modality, items in embedded.items()}
        tokens = {
            "prompt_token_ids": prompt.token_ids,
            "multi_modal_data": media,
            "multi_modal_uuids": hashes,
            "mm_processor_kwargs": decode_options(prompt.options),
            **({} if request.cache_salt is None else {"cache_salt": request.cache_salt}),
        }
        text = {} if request.prompt_text is None else {"prompt": request.prompt_text}
        rendered = await self._rendered(_with_decoder_prompt(prompt, tokens, text), has_embeds=bool(embedded))
        for modality, items in embedded.items():
            self._reader().check(modality, rendered, len(items))
        if self._checker is not None:
            processed: dict[Modality, Any] = {m: data for m, data in media.items() if m not in embedded}
            self._checker.check_rendered(rendered, processed, prompt.options)
            if modalities := self._checker.unchanged(processed, prompt.options):
                given = _with_decoder_prompt(prompt, tokens | {"mm_processor_kwargs": {}}, text)
                default = await self._rendered(given, has_embeds=bool(embedded))
                self._checker.check_unchanged(rendered, default, modalities)
        decoder = decoder_input(rendered)
        if prompt.encoder_token_ids is not None:  # vLLM may have added a start token, as the gateway's may have not
            decoder["prompt_token_ids"] = prompt.token_ids
        if media:
            decoder["mm_hashes"] = {m: self._in_order(theirs, hashes[m]) for m, theirs in decoder["mm_hashes"].items()}
        return rendered

    async def _rendered(self, given: Mapping[str, Any], *, has_embeds: bool) -> Any:
        try:
            (rendered,) = await self._renderer.render_cmpl_async([given])
        except VLLMError:
            raise
        except MALFORMED_FEATURE as error:
            if (fault := engine_fault(error)) is not None:
                raise fault from error
            # Too many items, options unsupported by the processor, or a prompt without the items' placeholders. For
            # embeddings the original message is not helpful: most families' processors do not expect them.
            message = public_text(error) if not has_embeds else "this model does not support these embeddings"
            raise PromptRejected(message) from error
        return rendered

    def _in_order(self, theirs: Sequence[str], ours: list[str]) -> list[str]:
        """Return our hashes of one modality in the order of vLLM's items, whose hashes are `theirs`.

        They are the same, but a family may have another order for its items (Jina-VL's is reversed). If there are
        options, vLLM hashes a uuid again; ours includes them, as in stage `features`, and replaces it if the family
        keeps the order.
        """
        is_known = sorted(theirs) == sorted(ours)
        keeps_order = not is_known and processes_items_apart(processor_of(self._renderer))
        return ours if keeps_order else list(theirs)

    async def _media(
        self, prompt: UnexpandedPrompt, tensors: Sequence[Sequence[memoryview]]
    ) -> tuple[dict[Modality, list[Any]], dict[Modality, list[str]]]:
        media: dict[Modality, list[Any]] = {}
        hashes: dict[Modality, list[str]] = {}
        if len(tensors) != len(prompt.media):
            raise InvalidFeature("the tensors of an item are missing")
        for item, datas in zip(prompt.media, tensors, strict=True):
            if len(datas) != 1:
                raise InvalidFeature(f"{item.modality}: {len(datas)} tensors instead of one")
            load = self._embeds if item.media_type == EMBEDS_TYPE else self._loads[prompt.stage]
            media.setdefault(item.modality, []).append(await load(item, datas[0]))
            hashes.setdefault(item.modality, []).append(item.mm_hash)
        return media, hashes

    async def _decoded(self, item: MediaPayload, data: memoryview) -> Any:
        return engine_media(decoded_over(item.modality, item.size, data))

    async def _embeds(self, item: MediaPayload, data: memoryview) -> dict[str, torch.Tensor]:
        try:
            return self._reader().read(item.modality, decode_embeds(data))
        except InvalidEmbeds as error:
            raise error.at(item.param or "") from error

    def _reader(self) -> EmbedsReader:
        if self._embeds_reader is None:
            raise PromptRejected("this model does not support media")
        return self._embeds_reader

    async def _encoded(self, item: MediaPayload, data: memoryview) -> Any:
        load = self._loader(item)

        def decode() -> Any:
            try:
                return load(bytes(data))
            except MedialaneError as error:
                raise error.at(item.param or "") from error
            except Exception as error:  # decoders raise anything for untrusted bytes: AttributeError, RuntimeError, ...
                raise _decode_error(error, item) from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, decode)

    def _loader(self, item: MediaPayload) -> Callable[[bytes], Any]:
        """Return vLLM's own loader, with the options merged by the gateway."""
        options = {**self._model_io.get(item.modality, {}), **decode_options(item.io)}
        if item.modality == "video":
            backend, image = video_backend(self._model_config), self._model_io.get("image", {})
            media_io: Any = video_io(options, backend=backend, image=image)
        else:
            media_io = _LOADERS[item.modality](**options)
        if item.media_type == "video/jpeg":
            return lambda data: media_io.load_base64("video/jpeg", _ascii(data))
        return lambda data: media_io.load_bytes(data)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _with_decoder_prompt(
    prompt: UnexpandedPrompt, tokens: Mapping[str, Any], text: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return vLLM's prompt: `tokens`, or the encoder's instead, followed by a decoder's."""
    if prompt.encoder_token_ids is None:
        return {**tokens, **text}
    encoder = {**tokens, "prompt_token_ids": prompt.encoder_token_ids}
    return {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": prompt.token_ids, **text}}


def _ascii(data: bytes) -> str:
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidVideo("the frames of a video must be base64") from error


def _decode_error(error: Exception, item: MediaPayload) -> BaseException:
    """Return what to raise if a decoder has raised `error`: the client's fault, unless there is evidence of ours."""
    fault = engine_fault(error)
    if isinstance(fault, ImportError):
        logger.error("this worker has no decoder for %s", item.media_type, exc_info=error)
        return UnsupportedMediaType(f"this server has no decoder for {item.media_type}", param=item.param)
    if fault is None and not raised_in(error, "medialane"):
        return MODALITIES[item.modality].invalid(f"the {item.modality} cannot be decoded", param=item.param)
    return fault or error


def decoded_over(modality: Modality, size: MediaSize, data: memoryview) -> Decoded:
    """Return decoded media over their bytes, without a copy. Raises InvalidFeature if size and bytes do not match."""
    try:
        return DECODED[modality].over(data, size)
    except ValueError as error:
        raise InvalidFeature(f"{modality}: {data.nbytes} bytes do not make {size}") from error


class EmbedsReader:
    """Reads and checks embeddings for one model."""

    def __init__(self, profile: ModelProfile, accepted: AcceptedEmbeds | None) -> None:
        """`accepted` is None if the model has not been tried: it then accepts none."""
        self._processor = profile.processor
        self._is_on = bool(self._processor.info.ctx.model_config.multimodal_config.enable_mm_embeds)
        self._width = 0 if accepted is None else accepted["width"]
        self._fields = set() if accepted is None else set(accepted["fields"])
        self._merge = profile.merge_size

    def read(self, modality: Modality, embeds: Embeds) -> dict[str, torch.Tensor]:
        """Return one item's tensors, over the received bytes without a copy. Raises InvalidEmbeds."""
        if not self._is_on:
            raise InvalidEmbeds(f"this server does not support {modality}_embeds (--enable-mm-embeds)")
        if modality != MODALITY or not self._fields:
            raise InvalidEmbeds(f"{modality}_embeds of this model are not supported by this gateway")
        if embeds.fields.keys() != self._fields:
            names = " and ".join(sorted(self._fields)) if UNNAMED not in self._fields else "one tensor without a name"
            raise InvalidEmbeds(f"{modality}_embeds of this model must be {names}")
        tensors = {name: tensor_over(sent.spec, memoryview(sent.data)) for name, sent in embeds.fields.items()}
        if UNNAMED in tensors:
            return {UNNAMED: self._rows(tensors[UNNAMED])}
        rows = self._rows(tensors[VALUES])
        return {VALUES: rows, GRID: self._grid(tensors[GRID], num_rows=len(rows))}

    def data(self, modality: Modality, items: Sequence[Any]) -> Any:
        """Return all items of one modality, as `read` returns them, in the form of vLLM's renderer. Raises
        InvalidEmbeds if some are other media."""
        if not all(isinstance(item, dict) for item in items):
            raise InvalidEmbeds(f"{modality}s and embeddings of {modality}s cannot be in one request")
        given = [item[UNNAMED] if UNNAMED in item else dict(item) for item in items]
        return embeds_data(modality, given, self._processor)

    def check(self, modality: Modality, engine_input: Mapping[str, Any], num_items: int) -> None:
        """Raise InvalidEmbeds unless each item has one embedding per token of its placeholder that needs one."""
        items, places = engine_input["mm_kwargs"][modality], engine_input["mm_placeholders"][modality]
        if not len(items) == len(places) == num_items:
            raise InvalidEmbeds(f"{len(items)} items and {len(places)} placeholders of {num_items} embeddings")
        for item, place in zip(items, places, strict=True):
            expected = (place.get_num_embeds(), self._width)
            values = item[VALUES].data if VALUES in item else None
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != expected:
                raise InvalidEmbeds(f"{modality}: embeddings do not have the shape {expected} of their placeholder")

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the embeddings as (tokens, hidden size). Also accepts a batch of one, like vLLM."""
        if not values.is_floating_point():
            raise InvalidEmbeds("embeddings must be floating-point numbers")
        shape = tuple(values.shape)
        if shape[-1:] != (self._width,) or len(shape) not in (2, 3) or shape[:-2] not in ((), (1,)):
            raise InvalidEmbeds(f"embeddings must have the shape (tokens, {self._width})")
        return values.view(shape[-2:])

    def _grid(self, grid: torch.Tensor, *, num_rows: int) -> torch.Tensor:
        """Return (frames, rows, columns) of patches as a vector, for any input shape."""
        if grid.dtype != torch.int64 or grid.numel() != _GRID_NUMBERS:
            raise InvalidEmbeds(f"{GRID} must be three integers (int64)")
        numbers = grid.view(-1).tolist()
        if min(numbers) < 1 or any(n % self._merge for n in numbers[1:]):
            raise InvalidEmbeds(f"{GRID} must be positive, rows and columns multiples of {self._merge}")
        if prod(numbers) != num_rows * self._merge**2:
            raise InvalidEmbeds(f"{GRID} does not match the number of embeddings")
        return grid.view(-1)
