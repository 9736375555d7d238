"""vLLM's front end in a worker, and the messages between it and EngineCore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.stats import RequestStateStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    # Importing it loads EngineCore. A gateway, which also encodes messages, must not: `plugin.register` checks for it.
    from vllm.v1.engine.async_llm import AsyncLLM


class ItemEncoder(MsgpackEncoder):  # type: ignore[misc]  # vllm is not typed
    """vLLM's encoder, with a public method for multimodal items, which subclasses override."""

    def encode_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        return super()._encode_mm_item(item)

    def _encode_mm_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        return self.encode_item(item)


class ItemDecoder(MsgpackDecoder):  # type: ignore[misc]  # vllm is not typed
    """vLLM's decoder, with a public method for multimodal items, which subclasses override."""

    def decode_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        return super()._decode_mm_item(obj)

    def _decode_mm_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        return self.decode_item(obj)


class FrontEndInputs(InputProcessor):  # type: ignore[misc]  # vllm is not typed
    """The input processor for vLLM's app, whose beam search queries whether outputs are watermarked. It lacks what only
    an engine needs: workers validate requests."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config


def encode_with(llm: AsyncLLM, encoder: type[ItemEncoder]) -> None:
    """Make the front end encode its messages to EngineCore with `encoder`."""
    inner = llm.engine_core.encoder
    llm.engine_core.encoder = encoder(inner.size_threshold, inner.oob_tensor_consumer)


async def call_every_engine(llm: AsyncLLM, method: str, *args: Any) -> list[Any]:
    """Call a method of every EngineCore, between two of its steps. Raises EngineDeadError, or Exception if the method
    fails."""
    return list(await llm.engine_core.call_utility_all_async(method, *args))


def is_engine_dead(llm: AsyncLLM) -> bool:
    return bool(llm.engine_core.resources.engine_dead)


def num_unfinished_by_rank(llm: AsyncLLM) -> list[int]:
    """Return the number of unfinished requests of each data-parallel rank, for an engine with several."""
    core = llm.engine_core
    num_by_engine = Counter(core.reqs_in_flight.get(request_id) for request_id in llm.output_processor.request_states)
    return [num_by_engine[engine] for engine in core.core_engines]


#: Characters that vLLM adds to the id by which a request is made.
_SUFFIX = len("-12345678")


def watch_transfers(
    llm: AsyncLLM, note: Callable[[str, int], None], note_kept: Callable[[str, dict[str, Any]], None]
) -> None:
    """Call `note`, before the first output of a request, with the id by which it was made, and the number of tokens
    whose KV blocks were read from another engine; and `note_kept` with that and the connector's parameters of blocks
    that are kept for another engine, even if the request was aborted meanwhile. To be called before the first
    request."""
    processor = llm.output_processor
    process_outputs = processor.process_outputs

    def process(engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.kv_transfer_params is not None:  # of an aborted request vLLM knows no other id any more
                note_kept(output.request_id[:-_SUFFIX], output.kv_transfer_params)
            if (stats := output.prefill_stats) is not None:
                state = processor.request_states.get(output.request_id)
                if state is not None:
                    note(state.external_req_id, stats.num_external_cached_tokens)
        return process_outputs(engine_core_outputs, *args, **kwargs)

    processor.process_outputs = process


def stop_listening(llm: AsyncLLM) -> None:
    """Stop the output handler before a shutdown, which it would otherwise log as the engine's death."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def encoder_cache_tokens(llm: AsyncLLM) -> int:
    return int(llm.input_processor.mm_encoder_cache_size)


# The text of tokens that an engine of another process has generated


class CompletionText:
    """The text of one completion, as vLLM's front end streams it: it holds back what may become a stop string, and
    bytes of an incomplete character. Without a `tokenizer` there is none."""

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def add(self, token_ids: list[int], *, is_stopped: bool) -> tuple[int, str | None]:
        """Add tokens; the last one has stopped the completion if it `is_stopped`. Return the number of tokens that
        are part of the completion, and the stop string that they complete, if they do."""
        num_before = self.detokenizer.num_output_tokens()
        stop_string = self.detokenizer.update(token_ids, is_stopped)
        return self.detokenizer.num_output_tokens() - num_before, stop_string

    def next_text(self, *, is_last: bool) -> str:
        """Return the text that can be sent and has not been returned yet."""
        return str(self.detokenizer.get_next_output_text(is_last, True))


class TokenTexts:
    """The text of single tokens, as vLLM has it in log probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        #: Decoding one takes 20 us or more, and each position has as many as the client wants.
        self.texts: dict[int, str] = {}
        self.processor = LogprobsProcessor(
            tokenizer=tokenizer,
            logprobs=None,
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=None,
            num_prompt_logprobs=None,
        )

    def of(self, token_ids: list[int], preceding: list[int]) -> list[str]:
        """Return the text of each of these candidates for a position behind the tokens `preceding` it, of which vLLM
        considers four: a token that completes a character has the character."""
        for token_id in token_ids:
            if token_id not in self.texts:
                (self.texts[token_id],) = convert_ids_list_to_tokens(self.tokenizer, [token_id])
        texts = [self.texts[token_id] for token_id in token_ids]
        return list(self.processor._verify_tokens(texts, token_ids, preceding))
