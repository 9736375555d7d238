"""Chats of Mistral tokenizers, tokenized with blanks for their media, and expanded later: the prompts are vLLM's."""

import base64
import io
import os
import subprocess
import sys
from functools import cache

import msgspec
import numpy as np
import pytest
from PIL import Image as PILImage
from tiny_families import FAMILIES
from vllm.tokenizers import cached_tokenizer_from_config

from audio_maker import tone
from medialane.prepare import FactoryConfig
from medialane.prepare.forkserver_environment import exec_environ
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, cache_folder
from medialane.types.errors import PromptRejected
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import AudioSamples, Image, MediaSize
from medialane.types.request import EngineRequest, UnexpandedPrompt
from medialane.vllm_bridge.frontend import renderer_hook
from medialane.vllm_bridge.items import VllmProcessor, expand_marks, tokenize_without_media
from medialane.vllm_bridge.learned import VllmAssembler
from model_parts import unexpanded_renderer

pytestmark = [
    pytest.mark.timeout(120),  # the first test of a family creates its checkpoint and renderer
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),  # torch's, when vLLM resamples audio
]

IMAGES = ("pixtral_mistral", "mistral_small")
RATE = 16000


def image(seed, width, height):
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def audio(seconds):
    """As the tokenizer decodes the same tone. At another rate it would resample it, which needs another library."""
    return AudioSamples(np.zeros(round(seconds * RATE), np.float32), RATE)


SMALL, WIDE, TALL, LARGE, POINT = (
    image(seed, *size) for seed, size in enumerate([(200, 150), (900, 40), (77, 1000), (2000, 1500), (1, 1)])
)
SHORT, LONG = audio(0.4), audio(31.3)


def part(media, reference="medialane:0"):
    """A media part as intake leaves it; with `reference` None, the media themselves, for the tokenizer to open."""
    if isinstance(media, Image):
        return {"type": "image_url", "image_url": {"url": reference or f"data:image/png;base64,{_png(media)}"}}
    data = reference or base64.b64encode(tone(440, len(media.samples) / RATE, rate=RATE)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _png(media):
    data = io.BytesIO()
    PILImage.fromarray(media.pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def text(words):
    return {"type": "text", "text": words}


TOOL_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chats(one, two):
    """Messages by name, with (part of) these items."""
    return {
        "one": [[("user", [one])]],
        "text around": [[("user", ["Look at ", one, " and say."])]],
        "two": [[("user", [one, two, "Well?"])]],
        "the other order": [[("user", [two, " or ", one])]],
        "the same twice": [[("user", [one, " or ", one])]],
        "system": [[("system", ["Be brief."]), ("user", [two, "Well?"])]],
        "turns": [[("user", [one, "What?"]), ("assistant", "A harbour."), ("user", ["And ", two])]],
        "one role twice": [[("user", [one]), ("user", ["or ", two])]],
        "tools": [[("user", [one, "What?"]), ("tool", ""), ("assistant", "Well."), ("user", [two])]],
        "text alone": [[("user", ["Say something."])]],
    }


def messages_of(turns, reference):
    """The messages in the API of chat completions, and their media."""
    found, media = [], []
    for role, content in turns:
        if role == "tool":
            found.append({"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]})
            found.append({"role": "tool", "tool_call_id": "abcdefghi", "content": "A pier."})
            continue
        if isinstance(content, list):
            media += [piece for piece in content if not isinstance(piece, str)]
            content = [text(piece) if isinstance(piece, str) else part(piece, reference) for piece in content]
        found.append({"role": role, "content": content})
    return found, media


CASES = [
    pytest.param(family, turns, id=f"{family} {name} {number}", marks=FAMILIES[family].marks if number else ())
    for family, pairs in {
        "pixtral_mistral": [(SMALL, TALL), (POINT, LARGE)],
        "mistral_small": [(SMALL, TALL), (POINT, WIDE), (LARGE, POINT)],
        "voxtral": [(SHORT, LONG), (LONG, SHORT)],
    }.items()
    for number, pair in enumerate(pairs)
    for name, (turns,) in chats(*pair).items()
]


class Chats:
    """A family's renderer with our blanks, its processor with our expansion, and vLLM's own tokenizer."""

    def __init__(self, renderer):
        self.renderer = renderer
        self.own = cached_tokenizer_from_config(renderer.model_config)
        tokenize_without_media(renderer)
        self.processor = renderer.get_mm_processor()
        expand_marks(self.processor)

    def tokenized(self, turns):
        messages, media = messages_of(turns, "medialane:0")
        return self.renderer.tokenizer.apply_chat_template(messages), media

    def whole(self, turns):
        """The prompt by vLLM's own tokenizer, which opens the media."""
        return self.own.apply_chat_template(messages_of(turns, None)[0])

    def features(self, media):
        heavy = VllmProcessor(self.processor)
        return tuple(
            Feature("image" if isinstance(item, Image) else "audio", f"{n}", made.header, (), made.size)
            for n, (item, made) in enumerate((item, heavy.process(item, b"{}")) for item in media)
        )


@pytest.fixture(scope="module")
def chats_of(family_renderer):
    """`Chats` by family, created on first use."""
    return cache(lambda name: Chats(family_renderer(name)))


@pytest.mark.parametrize(("family", "turns"), CASES)
def test_expanded_prompt_is_the_one_of_vllms_tokenizer(chats_of, family, turns):
    found = chats_of(family)
    token_ids, media = found.tokenized(turns)
    if not media:
        assert token_ids == found.whole(turns)
        return
    assembled = VllmAssembler(found.processor).assemble(token_ids, found.features(media), b"{}")
    assert assembled.token_ids == found.whole(turns)
    starts = [place.offset for place in assembled.placeholders]
    assert starts == sorted(starts)


@pytest.mark.parametrize(("family", "media"), [(f, (SMALL, TALL)) for f in IMAGES] + [("voxtral", (SHORT, LONG))])
async def test_worker_expands_the_same_prompt_in_stage_decoded(chats_of, family, media):
    found = chats_of(family)
    turns = [("user", [media[0], "and ", media[1]])]
    token_ids, _ = found.tokenized(turns)
    source = unexpanded_renderer(found.renderer)
    prompt = UnexpandedPrompt(token_ids, tuple(_payload(item, n) for n, item in enumerate(media)), stage="decoded")
    request = EngineRequest("1", prompt, b"")
    try:
        rendered = await source.render(request, prompt, [[memoryview(_data(item)).cast("B")] for item in media])
    finally:
        source.close()
    assert rendered["prompt_token_ids"] == found.whole(turns)


def _data(item):
    return np.ascontiguousarray(item.pixels if isinstance(item, Image) else item.samples)


def _payload(item, number):
    size = item.size if isinstance(item, Image) else MediaSize(num_samples=len(item.samples), sample_rate=RATE)
    return MediaPayload("image" if isinstance(item, Image) else "audio", f"{number:064x}", b"", (), size)


@pytest.mark.parametrize("family", [*IMAGES, "voxtral"])
def test_prompt_that_has_placeholders_already_is_left_as_it_is(chats_of, family):
    """vLLM's warm-up, and the prompts of transcriptions."""
    found = chats_of(family)
    for media in ([SHORT, LONG] if family == "voxtral" else [SMALL, POINT]), [LONG if family == "voxtral" else TALL]:
        token_ids = found.whole([("user", list(media))])
        assembled = VllmAssembler(found.processor).assemble(token_ids, found.features(media), b"{}")
        assert assembled.token_ids == token_ids


@pytest.mark.parametrize(("family", "media"), [("mistral_small", SMALL), ("voxtral", LONG)])
@pytest.mark.parametrize(("num_parts", "num_items"), [(1, 2), (2, 1), (0, 1)])
def test_prompt_with_another_number_of_items_is_rejected(chats_of, family, media, num_parts, num_items):
    found = chats_of(family)
    token_ids, _ = found.tokenized([("user", ["Look", *[media] * num_parts])])
    with pytest.raises(PromptRejected, match=f"{num_parts} placeholders for {num_items}"):
        VllmAssembler(found.processor).assemble(token_ids, found.features([media] * num_items), b"{}")


@pytest.mark.parametrize("family", [*IMAGES, "voxtral"])
def test_chats_are_not_tokenized_on_the_event_loop(chats_of, family):
    renderer = chats_of(family).renderer
    executor = renderer._executor  # vLLM's own: there is no other door to its thread
    before = executor.submit
    renderer_hook.install_inline_rendering(renderer, None)
    assert executor.submit == before


def test_other_tokenizers_and_processors_are_left_as_they_are(renderer):
    tokenizer, processor = renderer.tokenizer, renderer.get_mm_processor()
    before = dict(vars(processor))
    tokenize_without_media(renderer)
    expand_marks(processor)
    assert renderer.tokenizer is tokenizer
    assert vars(processor) == before


_BUILT = """
import os, sys
from medialane.vllm_bridge.learned.processor_factory import build_processor
build_processor(sys.stdin.buffer.read())
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", [*IMAGES, "voxtral"])
def test_process_that_preparers_fork_from_stays_single_threaded(family):
    """mistral_common resizes images with OpenCV, which has a thread pool."""
    model, flags = str(FAMILIES[family].build(cache_folder(os.environ))), FAMILIES[family].flags
    config = msgspec.json.encode(FactoryConfig(model=model, vllm_args=flags))
    environ = exec_environ({**os.environ, **TINY_MODEL_ENVIRON})
    built = subprocess.run([sys.executable, "-c", _BUILT], input=config, env=environ, capture_output=True, check=True)
    assert built.stdout.split()[-1] == b"1"
