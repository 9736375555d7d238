"""Token counts that eight families predict from an image's size, compared with its placeholder in a prompt."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_families import FAMILIES

from medialane.core.errors import PromptTooLong
from medialane.core.hashing import canonical_options
from medialane.core.media import Image
from medialane.vllm_bridge.image_tokens import ImageTokens, _Trial
from medialane.vllm_bridge.placeholder_layout import PlaceholderLayouts
from medialane.vllm_bridge.preparation import VllmProcessor

pytestmark = [
    pytest.mark.timeout(120),
    # a warning of transformers when vLLM passes a request's options
    pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning"),
]

#: Families that never predict too many tokens. Gemma-3 counts only image tokens, without the surrounding ones.
SAYS = {
    "qwen2_5_vl": True,
    "qwen3_vl": True,
    "qwen2_5_omni": True,
    "gemma3": True,
    "paligemma": True,
    "llava_next": True,
    "internvl": True,
    "qwen2_audio": False,
}
SIZES = [(64, 64), (640, 480), (480, 640), (1500, 200), (1600, 1200)]
SMALL = canonical_options({"size": {"longest_edge": 200_000, "shortest_edge": 3136}})


@pytest.fixture(scope="module")
def processor(family_renderer):
    """A family's processor as preparers have it, warm, for prompts of 100 tokens; created on first use."""

    @cache
    def of(name):
        one = VllmProcessor(family_renderer(name).get_mm_processor(), max_model_len=100)
        one.warm_up()
        return one

    return of


def in_prompt(engine_processor, item, options=b"{}"):
    layout = PlaceholderLayouts(engine_processor).find([_Trial("image", item.header, item.size)], options)
    return min(len(update.content.full) for update in layout.updates["image"][0])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_predicting_image_tokens(processor, name):
    assert processor(name)._tokens.is_trusted == SAYS[name]


@pytest.mark.parametrize("name", [name for name, says in SAYS.items() if says])
def test_predicted_tokens_never_exceed_those_in_the_prompt(processor, name):
    one = processor(name)
    for width, height in SIZES:
        item = one.process(Image(np.zeros((height, width, 3), np.uint8)), b"{}")
        said = one._tokens.min_tokens((width, height), b"{}")
        actual = in_prompt(one._processor, item)
        assert said <= actual
        if "qwen" in name:
            assert said == actual


def test_image_too_large_for_any_prompt_gives_vllms_error(processor):
    one = processor("qwen2_5_vl")
    one.check_size((200, 200), b"{}")
    with pytest.raises(
        PromptTooLong, match=r"length at least \d+\) is longer than the maximum model length of 100\. Make"
    ):
        one.check_size((7000, 7000), b"{}")


def test_options_that_shrink_an_image_are_considered(processor):
    one = processor("qwen2_5_vl")
    tiny = canonical_options({"size": {"longest_edge": 50_000, "shortest_edge": 3136}})
    one.check_size((7000, 7000), tiny)
    item = one.process(Image(np.zeros((700, 700, 3), np.uint8)), tiny)
    assert one._tokens.min_tokens((700, 700), tiny) == in_prompt(one._processor, item, tiny)


@pytest.mark.parametrize(
    "options", [{"do_resize": False}, {"anything": 1}, {"size": "large"}, {"size": {"longest_edge": -1}}]
)
def test_unknown_options_cause_no_rejection(processor, options):
    processor("qwen2_5_vl").check_size((7000, 7000), canonical_options(options))


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (0, 0)])
def test_size_unsupported_by_the_family_is_left_to_its_processor(processor, size):
    assert processor("qwen2_5_vl").check_size(size, b"{}") is None


def test_prediction_exceeding_the_actual_tokens_is_disabled(processor):
    engine_processor = processor("qwen2_5_vl")._processor
    items = [processor("qwen2_5_vl").process(Image(np.zeros((64, 64, 3), np.uint8)), b"{}")]
    tokens = ImageTokens(engine_processor, 1)
    tokens.check((7000, 7000), b"{}")
    tokens.min_tokens = lambda *_: 1000
    tokens.verify(items)
    assert not tokens.is_trusted


@pytest.mark.parametrize(
    "options", [{"return_tensors": "np"}, {"return_tensors": "nonsense"}, {"patch_size": "x"}, {"merge_size": 0}]
)
def test_options_that_break_a_processor_are_client_errors(processor, options):
    from medialane.core.errors import InvalidRequest

    with pytest.raises(InvalidRequest):
        processor("qwen2_5_vl").process(Image(np.zeros((64, 64, 3), np.uint8)), canonical_options(options))


def test_tokens_per_size_are_computed_once():
    asked = []

    def get_num_image_tokens(*, image_width, image_height):
        asked.append((image_width, image_height))
        return image_width

    info = SimpleNamespace(get_num_image_tokens=get_num_image_tokens)
    tokens = ImageTokens(SimpleNamespace(info=info), max_model_len=100)
    tokens.is_trusted = True
    for _ in range(3):
        tokens.check((640, 90), b"{}")
        with pytest.raises(PromptTooLong):
            tokens.check((640, 480), b"{}")
    assert sorted(asked) == [(90, 640), (480, 640), (640, 90), (640, 480)]
    tokens.check((640, 90), SMALL)
    assert len(asked) == 6, "with other options they may be others"
