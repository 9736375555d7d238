"""Implements `types.request.Continuable` for vLLM: what an answer of one engine needs to go on in another.

Theory of operation. The rest of a completion is a request whose prompt is followed by the tokens that were delivered.
Most of what shapes a token depends on the tokens before it, wherever they come from. What depends on which of them are
*output* either counts them, and is asked for less (`max_tokens`, `min_tokens`), or is lost with the engine, and an
obstacle.

Text cannot come from the other worker: its detokenizer would begin at the seam, while the first one may have held back
bytes of a character there, or the beginning of a stop string. So it sends tokens only, and vLLM's own detokenizer makes
their text here. It is fed with the delivered tokens first, but not with thousands: its state depends on the last few
that have text, so it gets as many as have more text than stop strings can hold back, with some before them as its
prompt. What it has not sent then is what the client has not had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.types.request import CompletionDelta, Logprobs, TokenLogprob
from medialane.vllm_bridge.seams.engine import CompletionText, TokenTexts

#: Delivered tokens with which a detokenizer is fed, if their text is longer than stop strings; and the tokens before
#: them, its prompt.
NUM_FED = 64
NUM_CONTEXT = 64

#: The first characters of a text depend on tokens before its prompt: only if it has more, what is held back is right.
_NUM_SETTLED_CHARS = 32

#: Tokens that vLLM considers in front of one whose text is wanted: a character has no more bytes.
_NUM_PRECEDING = 4

#: What of `SamplingParams` refers to the tokens of the output, which begins anew at the other worker. The rest was
#: found to be indifferent to that, or is adapted by `_params_after`; a test knows all fields.
OBSTACLES = {
    "structured_outputs": "structured output",
    "frequency_penalty": "a frequency penalty",
    "presence_penalty": "a presence penalty",
    "bad_words": "a list of bad words",
    "thinking_token_budget": "a thinking budget",
    "repetition_detection": "the detection of repetitions",
    "trace_decode_token_ids": "the replay of a trace",
    "extra_args": "an extra argument of the engine (vllm_xargs)",
}
_DEFAULTS = SamplingParams()


class Continuations:
    """What the continuations of one front end have in common. Making one for each request costs nothing."""

    def __init__(self, config: VllmConfig, renderer: BaseRenderer, encode: Callable[[SamplingParams], bytes]) -> None:
        self._renderer = renderer
        self.encode = encode
        self.has_watermark = config.watermark_config is not None
        self.obstacle = ""
        if config.model_config.is_diffusion:
            self.obstacle = "a model that generates by diffusion"
        elif config.model_config.logits_processors or entry_points(group="vllm.logits_processors"):
            self.obstacle = "a custom logits processor"  # it may have state

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        tokenizer = self._renderer.tokenizer
        return None if tokenizer is None else TokenTexts(tokenizer)


class ContinuableAnswer:
    """Implements `types.request.Continuable`. `prompt_token_ids` are set anew if a worker has expanded them."""

    __slots__ = ("_common", "_params", "prompt_token_ids")

    def __init__(self, common: Continuations, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._common = common
        self._params = params
        self.prompt_token_ids = prompt_token_ids

    @property
    def obstacle(self) -> str:
        params = self._params
        if self._common.obstacle:
            return self._common.obstacle
        for name, obstacle in OBSTACLES.items():
            if getattr(params, name) not in (getattr(_DEFAULTS, name), [], {}):  # the Responses API passes empty ones
                return obstacle
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            return "a stream of cumulative outputs"
        if self._common.has_watermark and params.watermarking is not False:
            return "a watermark"  # a context that the output repeats is not marked again
        return ""

    @property
    def num_choices(self) -> int:
        return int(self._params.n)

    def rest(self, index: int, token_ids: Sequence[int], *, cumulative_logprob: float | None) -> RestOfCompletion:
        logprob = cumulative_logprob
        return RestOfCompletion(
            self._common, self._params, self.prompt_token_ids, token_ids, index=index, cumulative_logprob=logprob
        )


class RestOfCompletion:
    """Implements `types.request.RestOfChoice`."""

    def __init__(
        self,
        common: Continuations,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        index: int,
        cumulative_logprob: float | None,
    ) -> None:
        self._index = index
        self._token_texts = token_texts = common.token_texts if params.detokenize else None
        #: None if no log probabilities are wanted.
        self._sum = None if params.num_logprobs is None else cumulative_logprob or 0.0
        self._preceding = list(token_ids[-_NUM_PRECEDING:])
        self._is_complete = params.max_tokens is not None and len(token_ids) >= params.max_tokens
        tokenizer = None if token_texts is None else token_texts.tokenizer
        self._text = _text_after(params, tokenizer, prompt_token_ids, token_ids)
        self.sampling_params = common.encode(_params_after(params, len(token_ids), index))

    def restore(self, completion: CompletionDelta) -> CompletionDelta:
        if self._is_complete:  # one token is the least that can be asked for
            completion = CompletionDelta(self._index, "", [], finish_reason="length")
        num_kept, stop_string = self._text.add(
            list(completion.token_ids), is_stopped=completion.finish_reason == "stop"
        )
        finish_reason = "stop" if stop_string is not None else completion.finish_reason
        token_ids = completion.token_ids[:num_kept]
        return CompletionDelta(
            index=self._index,
            text=self._text.next_text(is_last=finish_reason is not None),
            token_ids=token_ids,
            logprobs=self._logprobs(token_ids, completion.logprobs),
            cumulative_logprob=self._sum,
            finish_reason=finish_reason,
            stop_reason=completion.stop_reason if stop_string is None else stop_string,
        )

    def _logprobs(self, token_ids: Sequence[int], logprobs: Logprobs | None) -> Logprobs | None:
        """Return the log probabilities of these tokens with the text of each candidate, and add them to the sum."""
        if logprobs is None or self._sum is None:
            return None
        restored: Logprobs = []
        for token_id, candidates in zip(token_ids, logprobs, strict=False):
            restored.append(None if candidates is None else self._with_text(candidates))
            if candidates:  # the sampled one first
                self._sum += candidates[0].logprob
            self._preceding = [*self._preceding, token_id][-_NUM_PRECEDING:]
        return restored

    def _with_text(self, candidates: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        if self._token_texts is None:
            return list(candidates)
        texts = self._token_texts.of([each.token_id for each in candidates], self._preceding)
        return [
            TokenLogprob(each.token_id, each.logprob, each.rank, text)
            for each, text in zip(candidates, texts, strict=True)
        ]


def _params_after(params: SamplingParams, num_tokens: int, index: int) -> SamplingParams:
    """Return the parameters of what is left of a completion after `num_tokens` of its tokens."""
    scores_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    return msgspec.structs.replace(
        params,
        n=1,
        seed=None if params.seed is None else params.seed + index,  # as vLLM seeds each of several completions
        max_tokens=None if params.max_tokens is None else max(1, params.max_tokens - num_tokens),
        min_tokens=max(0, params.min_tokens - num_tokens),
        detokenize=False,
        stop=None,
        output_text_buffer_length=0,
        # They came with the first output; to compute them, the prompt was not read from the prefix cache.
        prompt_logprobs=None,
        prompt_logprob_token_ids=None,
        prompt_logprob_start=None,
        skip_reading_prefix_cache=None if scores_prompt else params.skip_reading_prefix_cache,
        output_kind=RequestOutputKind.DELTA,
    )


def _text_after(
    params: SamplingParams, tokenizer: Any, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> CompletionText:
    """Return the text of a completion from where the client has had it, whose `token_ids` were delivered."""
    num_fed = min(len(token_ids), NUM_FED)
    num_chars = _NUM_SETTLED_CHARS + max(map(len, params.stop or ()), default=0)
    while True:
        num_before = len(token_ids) - num_fed
        context = [*prompt_token_ids[-NUM_CONTEXT:], *token_ids[max(0, num_before - NUM_CONTEXT) : num_before]]
        # No stop string is complete in what was delivered, so it need not be looked for there.
        min_tokens = max(num_fed, params.min_tokens - num_before)
        text = CompletionText(
            tokenizer, msgspec.structs.replace(params, min_tokens=min_tokens, max_tokens=None), context[-NUM_CONTEXT:]
        )
        text.add(list(token_ids[num_before:]), is_stopped=False)
        if len(text.next_text(is_last=False)) >= num_chars or not num_before:
            return text
        num_fed = min(len(token_ids), 2 * num_fed)
