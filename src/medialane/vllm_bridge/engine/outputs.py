"""Converts vLLM's `RequestOutput` and `PoolingRequestOutput` to `OutputDelta` and back, field by field.

Fields that vLLM's OpenAI app reads are included; fields that belong to one engine (routed experts, sampling masks) stay
in the worker. Parameters of KV transfers are added by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.types.errors import GenerationFailed, InvalidGrammar, Unavailable
from medialane.types.feature import MediaSpan
from medialane.types.request import CompletionDelta, EngineTimes, Logprobs, OutputDelta, PooledPart, TokenLogprob
from medialane.vllm_bridge.items.features import spec_of, tensor_over
from medialane.vllm_bridge.seams.engine import RequestStateStats

#: A message of this size is encoded and decoded in 0.1 ms: token embeddings of a long prompt may take many.
POOLED_PART_BYTES = 256 * 1024

#: Members of vLLM's StructuredOutputsParams: a request has one.
_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def to_delta(
    output: RequestOutput, *, first: bool, expanded: list[int] | None = None, placed: Sequence[MediaSpan] = ()
) -> OutputDelta:
    """Return one step of an output as a message. The first one includes timings and, for a prompt expanded here, what
    the gateway does not know: its token ids (`expanded`), and the positions of its items (`placed`)."""
    return OutputDelta(
        request_id=output.request_id,
        completions=[_completion(completion) for completion in output.outputs],
        finished=output.finished,
        prompt_token_ids=expanded if first else None,
        prompt_logprobs=_logprobs(output.prompt_logprobs),
        num_cached_tokens=output.num_cached_tokens,
        num_cache_creation_tokens=output.num_cache_creation_tokens,
        times=_times(output.metrics) if first else None,
        placed=tuple(placed) if first else (),
    )


def to_pooled_deltas(
    output: PoolingRequestOutput, *, expanded: list[int] | None = None, placed: Sequence[MediaSpan] = ()
) -> Iterator[OutputDelta]:
    """Yield the output of a pooling request as messages of at most POOLED_PART_BYTES of its tensor."""
    spec = spec_of(output.outputs.data)
    flat = output.outputs.data.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, max(1, flat.nbytes), POOLED_PART_BYTES):
        end = start + POOLED_PART_BYTES
        yield OutputDelta(
            request_id=output.request_id,
            completions=[],
            finished=end >= flat.nbytes,
            prompt_token_ids=None if start else expanded,
            num_cached_tokens=output.num_cached_tokens,
            placed=() if start else tuple(placed),
            pooled=PooledPart(spec, flat[start:end]),
        )


def to_pooling_output(delta: OutputDelta, *, request_id: str, prompt_token_ids: list[int]) -> PoolingRequestOutput:
    """Return the whole output of a pooling request as vLLM's type. Raises GenerationFailed if it has no tensor."""
    if delta.pooled is None:
        raise GenerationFailed("the worker's engine has not pooled this request")
    data = tensor_over(delta.pooled.spec, delta.pooled.data)
    return PoolingRequestOutput(
        request_id=request_id,
        outputs=PoolingOutput(data),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=delta.num_cached_tokens or 0,
        finished=True,
    )


def to_request_output(
    delta: OutputDelta, *, request_id: str, prompt: str | None, prompt_token_ids: list[int]
) -> RequestOutput:
    """Return the step as vLLM's type. `request_id` is the app's own: ours may differ between attempts."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=_to_vllm_logprobs(delta.prompt_logprobs),
        outputs=[_to_vllm_completion(completion) for completion in delta.completions],
        finished=delta.finished,
        num_cached_tokens=delta.num_cached_tokens,
        num_cache_creation_tokens=delta.num_cache_creation_tokens,
    )


def with_end_apart(delta: OutputDelta, params: SamplingParams, text_of: Callable[[int], str]) -> Iterable[OutputDelta]:
    """Yield a step of a stream that follows a grammar, its last token in a step of its own.

    Steps are merged where a client or a link is slower than the engine. vLLM's app appends "{}" to the arguments of a
    forced tool if their text comes in the last step (`Parser.finalize_generation`, 0.32.0). `text_of` returns the text
    of a token.
    """
    if params.structured_outputs is None or params.include_stop_str_in_output:
        return (delta,)
    if params.output_kind is not RequestOutputKind.DELTA:
        return (delta,)
    steps, ends = list[CompletionDelta](), list[CompletionDelta]()
    for completion in delta.completions:
        tail = _last_text(completion, text_of)
        steps.append(completion if tail is None else _before_end(completion, tail))
        ends += [] if tail is None else [_end(completion, tail)]
    if not ends:
        return (delta,)
    return replace(delta, completions=steps, finished=False), replace(delta, completions=ends, prompt_logprobs=None)


def _last_text(completion: CompletionDelta, text_of: Callable[[int], str]) -> str | None:
    """Return the text of the last token if that token is to have a step of its own, otherwise None. The token that
    stops an answer has none."""
    if len(completion.token_ids) < 2 or not completion.text or isinstance(completion.stop_reason, str):
        return None
    if completion.finish_reason == "stop":
        return ""
    if completion.finish_reason != "length":
        return None
    tail = text_of(completion.token_ids[-1])
    return tail if completion.text.endswith(tail) and tail != completion.text else None


def _before_end(completion: CompletionDelta, tail: str) -> CompletionDelta:
    return replace(
        completion,
        text=completion.text.removesuffix(tail),
        token_ids=completion.token_ids[:-1],
        logprobs=completion.logprobs and completion.logprobs[:-1],
        finish_reason=None,
        stop_reason=None,
    )


def _end(completion: CompletionDelta, tail: str) -> CompletionDelta:
    logprobs = completion.logprobs and completion.logprobs[-1:]
    return replace(completion, text=tail, token_ids=completion.token_ids[-1:], logprobs=logprobs)


def _completion(completion: CompletionOutput) -> CompletionDelta:
    return CompletionDelta(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=_logprobs(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _to_vllm_completion(completion: CompletionDelta) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=_to_vllm_logprobs(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _logprobs(positions: Iterable[Mapping[int, Logprob] | None] | None) -> Logprobs | None:
    """Convert a list of dicts, or vLLM's FlatLogprobs, which behaves like one. The order within a position is kept."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else [TokenLogprob(token, p.logprob, p.rank, p.decoded_token) for token, p in position.items()]
        for position in positions
    ]


def _to_vllm_logprobs(positions: Logprobs | None) -> Any:
    if positions is None:
        return None
    return [
        None if position is None else {p.token_id: Logprob(p.logprob, p.rank, p.decoded_token) for p in position}
        for position in positions
    ]


def _times(stats: RequestStateStats | None) -> EngineTimes | None:
    if stats is None or not stats.first_token_ts:
        return None
    return EngineTimes(
        queue_s=max(0.0, stats.scheduled_ts - stats.queued_ts),
        prefill_s=max(0.0, stats.first_token_ts - stats.scheduled_ts),
        decode_s=max(0.0, stats.last_token_ts - stats.first_token_ts),
    )


def has_error(output: RequestOutput | PoolingRequestOutput) -> bool:
    """Return whether the engine has failed the request."""
    if isinstance(output, PoolingRequestOutput):
        return output.error is not None
    return any(completion.finish_reason == "error" for completion in output.outputs)


def check_grammar(failed: RequestOutput, params: SamplingParams) -> None:
    """Raise InvalidGrammar if the first output of a request with a grammar has failed before a second token."""
    structured = params.structured_outputs
    if structured is None or any(len(completion.token_ids) > 1 for completion in failed.outputs):
        return
    given = next(name for name in _GRAMMARS if getattr(structured, name) is not None)
    sources = "; it may come from response_format or from tools" if given in ("json", "structural_tag") else ""
    raise InvalidGrammar(
        f"structured_outputs.{given} is no grammar that the engine can compile and follow{sources}",
        param=f"structured_outputs.{given}",
    )


def to_deltas(
    output: RequestOutput | PoolingRequestOutput,
    *,
    first: bool,
    expanded: list[int] | None,
    placed: Sequence[MediaSpan],
) -> Iterable[OutputDelta]:
    """Return one output of vLLM as messages. Raises Unavailable or GenerationFailed if it is a failed pooling
    request."""
    if not isinstance(output, PoolingRequestOutput):
        return (to_delta(output, first=first, expanded=expanded, placed=placed),)
    if output.error is not None:
        raise (Unavailable if output.error.retryable else GenerationFailed)("the engine failed this request")
    return to_pooled_deltas(output, expanded=expanded, placed=placed)


def ended_by_front_end(output: RequestOutput | PoolingRequestOutput) -> bool:
    """Return whether a stop string or an abort ended it: EngineCore was notified but has not confirmed yet."""
    if isinstance(output, PoolingRequestOutput):
        return False
    return any(isinstance(c.stop_reason, str) or c.finish_reason == "abort" for c in output.outputs)
