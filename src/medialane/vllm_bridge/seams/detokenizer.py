"""vLLM's text of tokens, for tokens that an engine of another process has generated."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor


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
        """Add tokens, the last of which has stopped the completion if it `is_stopped`. Return the number of those that
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
        #: Decoding one takes 20 us or more, of which each position has as many as the client wants.
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
