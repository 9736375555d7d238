"""Converts `EngineRequest` to vLLM's types: sampling parameters, LoRA, reasoning arguments, engine input."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from vllm.inputs import build_enc_dec_input, mm_enc_dec_input, mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from medialane.types.errors import HandoverFailed, InvalidFeature, PromptRejected
from medialane.types.feature import EmbeddingUse, MediaPayload, MediaSpan
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import TensorDescriptor
from medialane.vllm_bridge.engine import embedding_connector
from medialane.vllm_bridge.engine.embedding_connector import absent_media, request_embeddings
from medialane.vllm_bridge.engine.engine_embeddings import EngineEmbeddings
from medialane.vllm_bridge.engine.kv_transfer import FOR_CONNECTOR, apply_transfer
from medialane.vllm_bridge.engine.unexpanded_prompt import UnexpandedRenderer
from medialane.vllm_bridge.items.arena_tensors import ArenaItem
from medialane.vllm_bridge.items.features import decode_item
from medialane.vllm_bridge.items.mistral_chat import expand_marks
from medialane.vllm_bridge.items.prepared_input import decoder_input, to_vllm_range
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.validation import placeholder_of
from medialane.vllm_bridge.seams.engine import MsgpackDecoder
from medialane.vllm_bridge.seams.vision_chunk import name_for_engine, takes_chunks

logger = logging.getLogger(__name__)

#: Raised by the typed decoders for malformed bytes; NotImplementedError is for msgpack extension types.
_UNREADABLE = (msgspec.DecodeError, NotImplementedError, TypeError, ValueError, RecursionError)

#: The sampling parameter that vLLM passes to the connector of its encoder cache.
_FOR_CONNECTOR = "ec_transfer_params"


class RequestReader:
    """Reads requests for one engine, and validates what vLLM would trust. `sources` renders the ones that are processed
    here; the owner closes it."""

    def __init__(
        self, llm: AsyncLLM, profile: ModelProfile | None, arenas: Container[str], embeddings: EngineEmbeddings
    ) -> None:
        """`profile` is None if the model does not support media; `arenas` is the live set of arenas that EngineCore
        has mapped."""
        self._arenas = arenas
        self._embeddings = embeddings
        self._kv_transfer = llm.vllm_config.kv_transfer_config
        self._checker = None if profile is None else profile.checker
        self._takes_chunks = profile is not None and takes_chunks(profile.processor)
        if profile is not None:
            if profile.unfit:
                modalities = " and ".join(profile.unfit)
                logger.warning("this worker processes %s of its requests: %s", modalities, profile.unfit_reason)
            expand_marks(profile.processor)
        self.renderer = UnexpandedRenderer(llm.renderer, llm.model_config, profile)
        self._params = MsgpackDecoder(SamplingParams)
        self._pooling_params = MsgpackDecoder(PoolingParams)
        self._lora = MsgpackDecoder(LoRARequest)

    def arguments(self, request: EngineRequest) -> dict[str, Any]:
        """Return keyword arguments of `AsyncLLM.generate`, or `encode` for pooling, without the adapter. Raises
        PromptRejected."""
        with readable("reasoning arguments"):
            reasoning = request.reasoning and msgspec.msgpack.decode(request.reasoning, type=dict[str, Any])
        common = {"trace_headers": request.trace_headers, "priority": request.priority}
        if request.is_pooling:  # vLLM itself chooses the rank of pooling requests
            return common
        return {
            **common,
            "data_parallel_rank": request.data_parallel_rank,
            "session_id": request.session_id,
            "reasoning_ended": request.reasoning_ended,
            "reasoning_parser_kwargs": reasoning,
        }

    def lora(self, request: EngineRequest) -> LoRARequest | None:
        """Return the request for the adapter, as gateways know it. Raises PromptRejected."""
        with readable("LoRA request"):
            return None if request.lora is None else self._lora.decode(request.lora)

    def params(self, request: EngineRequest, embeddings: bytes | None = None) -> SamplingParams:
        """Return the sampling parameters, decoded by type without pickle, with the request's `embeddings`. Raises
        PromptRejected."""
        with readable("sampling parameters"):
            params = self._params.decode(request.sampling_params)
        if request.generated and current_platform.is_cpu():
            # The runner for CPUs would draw the noise anew in any case, and vLLM's engine ends when the prompt of a
            # seeded request, which is longer now, is prefilled in chunks: it rewinds a generator that cannot be.
            params.seed = None
        if params.extra_args:
            # "full" makes the engine report blocks again that it already holds, as if they were copies.
            params.extra_args.pop("kv_cache_report_mode", None)
            params.extra_args.pop(_FOR_CONNECTOR, None)  # a client's: the connector is ours
            params.extra_args.pop(FOR_CONNECTOR, None)  # a client's: they name hosts to which the engine would connect
        if request.kv_transfer is not None:
            apply_transfer(params, request.kv_transfer, self._kv_transfer)
        if embeddings is not None:
            params.extra_args = {**(params.extra_args or {}), _FOR_CONNECTOR: {embedding_connector.KEY: embeddings}}
        return params

    def pooling_params(self, request: EngineRequest) -> PoolingParams:
        """Return the pooling parameters, decoded by type without pickle. Raises PromptRejected."""
        with readable("pooling parameters"):
            return self._pooling_params.decode(request.sampling_params)

    def embeddings(self, request: EngineRequest, uses: Sequence[EmbeddingUse | None]) -> bytes | None:
        """Return what `params` sends of the request's embeddings; None if there are none. Raises HandoverFailed,
        InvalidFeature."""
        if not any(uses) and not request.without_media:
            return None
        if not isinstance(request.prompt, ExpandedPrompt):
            raise HandoverFailed("only processed items have embeddings")
        if request.without_media:
            return absent_media(request.request_id, request.prompt.features, self._embeddings.card)
        return request_embeddings(
            request.request_id,
            request.prompt.features,
            uses,
            encoder=self._embeddings.card,
            arenas=self._embeddings.arenas,
        )

    async def engine_input(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> Any:
        """Return vLLM's engine input; its features are views of `tensors` and have been validated. An item whose
        embedding is loaded has none.

        Raises InvalidFeature, PromptRejected, and what `UnexpandedRenderer.render` raises.
        """
        rendered = await self._rendered(request, tensors, embeddings)
        if request.generated:
            # Not in place: the list may be the request's, which is still read.
            decoder = decoder_input(rendered)
            decoder["prompt_token_ids"] = [*decoder["prompt_token_ids"], *request.generated]
        return rendered

    async def _rendered(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None],
    ) -> Any:
        prompt = request.prompt
        if isinstance(prompt, UnexpandedPrompt):
            return await self.renderer.render(request, prompt, tensors)
        if not prompt.features:
            return tokens_input(prompt.token_ids, prompt=request.prompt_text, cache_salt=request.cache_salt)
        uses = embeddings or [None] * len(prompt.features)
        is_loaded = [request.without_media or (use is not None and use.is_filled) for use in uses]
        return self._with_features(request, prompt, tensors, is_loaded)

    def _with_features(
        self,
        request: EngineRequest,
        prompt: ExpandedPrompt,
        tensors: Sequence[Sequence[memoryview]],
        is_loaded: Sequence[bool],
    ) -> Any:
        if self._checker is None:
            raise PromptRejected("this model does not support media")
        parts = zip(prompt.features, tensors, is_loaded, strict=True)
        items = [ArenaItem(f.header) if on else self._item(f, datas) for f, datas, on in parts]
        self._checker.check(prompt, items)
        kwargs: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        ranges: dict[str, list[Any]] = {}
        for feature, item in zip(prompt.features, items, strict=True):
            kwargs.setdefault(feature.modality, []).append(item)
            hashes.setdefault(feature.modality, []).append(feature.mm_hash)
            ranges.setdefault(feature.modality, []).append(to_vllm_range(placeholder_of(feature)))
        expanded = mm_input(
            prompt.expanded_token_ids,
            MultiModalKwargsItems(kwargs),
            hashes,
            ranges,
            prompt=request.prompt_text if prompt.encoder_token_ids is None else None,
            cache_salt=request.cache_salt,
        )
        if prompt.encoder_token_ids is None:
            return expanded
        both = mm_enc_dec_input(expanded, prompt.token_ids, decoder_prompt=request.prompt_text)
        # The gateway's renderer has added the decoder's start token, if there must be one.
        return build_enc_dec_input(both, None, decoder_start_token_id=-1, skip_decoder_start_token=True)

    def named_for_engine(self, engine_input: Any) -> Any:
        """Return the engine input with the engine's names of modalities."""
        items = decoder_input(engine_input)
        if self._takes_chunks and items["type"] == "multimodal":
            for field in ("mm_kwargs", "mm_hashes", "mm_placeholders"):
                items[field] = name_for_engine(items[field])
        return engine_input

    def _item(self, feature: MediaPayload, datas: Sequence[memoryview]) -> MultiModalKwargsItem:
        """Return the item as it will be sent to EngineCore. Raises InvalidFeature."""
        if len(feature.tensors) != len(datas):
            raise InvalidFeature("a feature's tensors are incomplete")
        mapped = [t for t in feature.tensors if isinstance(t, TensorDescriptor) and t.range.arena in self._arenas]
        if mapped and len(mapped) == len(datas):
            return ArenaItem(feature.header, mapped, datas)
        return decode_item(feature.header, datas)


def has_arena_items(engine_input: Mapping[str, Any]) -> bool:
    """Return whether EngineCore will read tensors or embeddings of this input from an arena."""
    kwargs: Mapping[str, Sequence[Any]] = decoder_input(engine_input).get("mm_kwargs") or {}
    return any(isinstance(item, ArenaItem) for items in kwargs.values() for item in items)


def prompt_token_ids(engine_input: Mapping[str, Any], request: EngineRequest) -> list[int]:
    """Return the token ids of the decoder's prompt, without those generated elsewhere that follow it."""
    token_ids: list[int] = decoder_input(engine_input)["prompt_token_ids"]
    return token_ids[: len(token_ids) - len(request.generated)]


def placed_media(engine_input: Mapping[str, Any]) -> list[MediaSpan]:
    """Return where vLLM's renderer has placed the items of a prompt, in prompt order. Items of an encoder's prompt are
    not in the prompt that is continued."""
    if engine_input["type"] == "enc_dec":
        return []
    hashes = engine_input.get("mm_hashes") or {}
    spans = [
        MediaSpan(mm_hash, place.offset, place.length, modality, place.get_num_embeds())
        for modality, places in (engine_input.get("mm_placeholders") or {}).items()
        for mm_hash, place in zip(hashes[modality], places, strict=True)
    ]
    return sorted(spans, key=lambda span: span.offset)


def clamp(params: SamplingParams, engine_input: Mapping[str, Any], max_model_len: int) -> None:
    """Limit `max_tokens` to the tokens left: in stage `url` the gateway has computed it from the unexpanded prompt. If
    the prompt, with what was generated elsewhere, leaves none, vLLM rejects it."""
    left = max_model_len - len(decoder_input(engine_input)["prompt_token_ids"])
    if params.max_tokens is not None and 0 < left < params.max_tokens:
        params.max_tokens = left
        params.min_tokens = min(params.min_tokens, left)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Convert exceptions of the typed decoders to PromptRejected."""
    try:
        yield
    except _UNREADABLE as error:
        raise PromptRejected(f"the request's {what} cannot be read") from error
