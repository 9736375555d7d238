"""The text of an answer that goes on at another worker, against vLLM's own front end that had all of it. No engine: the
front ends of both workers are fed with given tokens."""

import os
from functools import cache
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tiny_families import FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from medialane.testing.tiny_model import cache_folder
from medialane.vllm_bridge.engine.outputs import to_delta
from medialane.vllm_bridge.frontend.continuation import ContinuableAnswer, Continuations

pytestmark = pytest.mark.timeout(120)

EMOJI = "naïve 👩‍👩‍👧‍👦 and 🇪🇺, 日本語 — done."
PROMPT = "user: tell me 👋"


def byte_level(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def metaspace(_tiny_model):
    """As Llama's: a leading space is dropped, and bytes are tokens."""
    vocabulary = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    vocabulary += ["▁", "▁tell", "▁me", "▁and", "▁done", "user", ":", ".", ",", "a", "b", "e", "n", "v"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def mistral(_tiny_model):
    """Not a fast tokenizer: vLLM has another detokenizer for it."""
    folder = FAMILIES["pixtral_mistral"].build(cache_folder(os.environ))
    return get_tokenizer(str(folder), tokenizer_mode="mistral")


TOKENIZERS = {"byte level": byte_level, "metaspace": metaspace, "mistral": mistral}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tiny_model):
    return TOKENIZERS[request.param](tiny_model)


@cache
def logprobs_of(position, token_id, vocabulary):
    """Log probabilities of a position: the sampled token, then the two best."""
    random = np.random.default_rng(position)
    token_ids = (token_id + np.array([0, *random.choice(vocabulary - 1, 2, replace=False) + 1])) % vocabulary
    return token_ids, -random.random(3, np.float32), int(random.integers(1, 9))


class Worker:
    """vLLM's front end, given what an engine would output."""

    def __init__(self, tokenizer, prompt, generated, params):
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.params = params
        self.position = len(generated)
        self.vocabulary = len(tokenizer)
        self.processor.add_request(
            EngineCoreRequest(
                "r", [*prompt, *generated], None, params, None, 0.0, None, None, None, external_req_id="r"
            ),
            None,
        )

    def output(self, token_ids, reason=None, stop_reason=None):
        """The front end's output after a step of the engine."""
        logprobs = None
        if self.params.logprobs is not None:
            numbers = range(self.position, self.position + len(token_ids))
            rows = [logprobs_of(n, t, self.vocabulary) for n, t in zip(numbers, token_ids, strict=True)]
            logprobs = LogprobsLists(*map(np.array, zip(*rows, strict=True)))
        self.position += len(token_ids)
        step = EngineCoreOutput(
            "r", list(token_ids), new_logprobs=logprobs, finish_reason=reason, stop_reason=stop_reason
        )
        outputs = self.processor.process_outputs([step]).request_outputs
        return to_delta(outputs[0], first=False).completions[0] if outputs else None


class Answer:
    """An answer whose engine generates `steps`, and ends with `reason`."""

    def __init__(self, tokenizer, prompt, steps, reason=FinishReason.LENGTH, stop_reason=None, **params):
        self.tokenizer = tokenizer
        self.prompt, self.steps, self.end = prompt, steps, (reason, stop_reason)
        num_tokens = sum(map(len, steps))
        self.params = SamplingParams(**{"max_tokens": num_tokens, "output_kind": RequestOutputKind.DELTA} | params)

    def run(self, worker, first, restore=lambda completion: completion):
        """The completions of the steps from the `first` on, up to the last one."""
        completions = []
        for number in range(first, len(self.steps)):
            is_last = number == len(self.steps) - 1
            output = worker.output(self.steps[number], *(self.end if is_last else ()))
            completions.append(restore(output))
            if completions[-1].finish_reason is not None:
                break
        return completions

    def undisturbed(self):
        return self.run(Worker(self.tokenizer, self.prompt, [], self.params), 0)

    def continued(self, whole, at):
        """The answer that goes on at another worker after its first `at` outputs."""
        delivered = whole[:at]
        token_ids = [token for completion in delivered for token in completion.token_ids]
        rest = self.rest(token_ids, delivered[-1].cumulative_logprob if delivered else None)
        params = MsgpackDecoder(SamplingParams).decode(rest.sampling_params)
        worker = Worker(self.tokenizer, self.prompt, token_ids, params)
        return [*delivered, *self.run(worker, at, rest.restore)]

    def rest(self, token_ids, cumulative_logprob=None):
        config = SimpleNamespace(
            model_config=SimpleNamespace(is_diffusion=False, logits_processors=None), watermark_config=None
        )
        common = Continuations(
            config, SimpleNamespace(tokenizer=self.tokenizer), lambda params: bytes(MsgpackEncoder().encode(params)[0])
        )
        return ContinuableAnswer(common, self.params, self.prompt).rest(
            0, token_ids, cumulative_logprob=cumulative_logprob
        )

    def check_every_break(self, step=1):
        """Continue it after each of its outputs but the last: all that the client gets is as it was, output by
        output."""
        whole = self.undisturbed()
        assert whole[-1].finish_reason is not None
        for at in range(0, len(whole), step):
            assert self.continued(whole, at) == whole, at
        return whole


def singly(token_ids):
    return [[token] for token in token_ids]


def encoded(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_characters_of_several_tokens_are_whole(tokenizer):
    answer = Answer(tokenizer, encoded(tokenizer, PROMPT), singly(encoded(tokenizer, EMOJI)), logprobs=2)
    whole = answer.check_every_break()
    assert "👩‍👩‍👧‍👦" in "".join(completion.text for completion in whole)
    assert any(not completion.text for completion in whole)  # so there are incomplete characters


def test_prompt_that_ends_within_a_character_is_context(tokenizer):
    prompt, emoji = encoded(tokenizer, PROMPT), encoded(tokenizer, "🇪🇺")
    Answer(tokenizer, [*prompt, *emoji[:-2]], singly([*emoji[-2:], *encoded(tokenizer, " and")])).check_every_break()


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_the_break(tokenizer, include):
    token_ids = encoded(tokenizer, "a b 👩‍👩‍👧 c STOP HERE and more")
    answer = Answer(
        tokenizer, encoded(tokenizer, PROMPT), singly(token_ids), stop=["STOP HERE", "never"],
        include_stop_str_in_output=include, logprobs=1,
    )  # fmt: skip
    whole = answer.check_every_break()
    assert (whole[-1].finish_reason, whole[-1].stop_reason) == ("stop", "STOP HERE")
    assert "".join(completion.text for completion in whole).endswith("STOP HERE" if include else "c ")


def test_stop_string_before_the_least_tokens_does_not_stop(tokenizer):
    token_ids = encoded(tokenizer, "one. two. three. four.")
    least = len(encoded(tokenizer, "one. two.")) + 2
    answer = Answer(tokenizer, encoded(tokenizer, PROMPT), singly(token_ids), stop=["."], min_tokens=least)
    whole = answer.check_every_break()
    assert "".join(completion.text for completion in whole).strip() == "one. two. three"


def test_text_of_the_token_that_stopped_is_left_out(tokenizer):
    token_ids = [*encoded(tokenizer, EMOJI), *encoded(tokenizer, "a")]
    for include in (False, True):
        answer = Answer(
            tokenizer, encoded(tokenizer, PROMPT), singly(token_ids), FinishReason.STOP, token_ids[-1],
            stop=["unseen"], include_stop_str_in_output=include,
        )  # fmt: skip
        whole = answer.check_every_break()
        assert whole[-1].stop_reason == token_ids[-1]


def test_several_tokens_of_a_step_are_cut_after_the_stop_string(tokenizer):
    """As speculative decoding has them; also merged outputs."""
    token_ids = encoded(tokenizer, "one two 👩‍👩‍👧 END three END four five")
    steps = [token_ids[start : start + 4] for start in range(0, len(token_ids), 4)]
    answer = Answer(tokenizer, encoded(tokenizer, PROMPT), steps, stop=["END"], logprobs=2)
    whole = answer.check_every_break()
    assert whole[-1].stop_reason == "END"
    assert len(whole[-1].logprobs) == len(whole[-1].token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"stop": ["x" * 200]},
        {"detokenize": False},
    ],
    ids=str,
)
def test_any_tokens(tokenizer, options):
    """Random tokens: invalid bytes, special tokens, all kinds of spaces. More than a detokenizer is fed with."""
    steps = singly(np.random.default_rng(1).integers(0, len(tokenizer), 250).tolist())
    Answer(tokenizer, encoded(tokenizer, PROMPT), steps, logprobs=2, **options).check_every_break(step=17)


def test_long_stretch_without_text(tokenizer):
    """Only special tokens, or bytes that make no character: the state is older than a few tokens."""
    emoji = encoded(tokenizer, "👩")
    token_ids = [*encoded(tokenizer, "text STO"), *emoji[:1] * 300, *encoded(tokenizer, "P and")]
    Answer(tokenizer, encoded(tokenizer, PROMPT), singly(token_ids), stop=["STOP", "and"]).check_every_break(step=29)


def test_choice_that_has_all_its_tokens_gets_no_more(tokenizer):
    """Its last token was delivered without the end of the answer."""
    token_ids = encoded(tokenizer, EMOJI)
    answer = Answer(tokenizer, encoded(tokenizer, PROMPT), singly(token_ids), stop=["unseen"])
    rest = answer.rest(token_ids)
    assert MsgpackDecoder(SamplingParams).decode(rest.sampling_params).max_tokens == 1
    last = rest.restore(msgspec.structs.replace(answer.undisturbed()[0], finish_reason="length"))
    assert (last.token_ids, last.finish_reason) == ([], "length")
    delivered = Worker(tokenizer, answer.prompt, [], answer.params)
    text = "".join(delivered.output([token]).text for token in token_ids)
    assert text + last.text == "".join(completion.text for completion in answer.undisturbed())
