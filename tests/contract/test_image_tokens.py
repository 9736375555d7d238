"""Token counts that families predict from an image's size, compared with its placeholder in a prompt."""

import copy
from functools import cache

import numpy as np
import pytest
from tiny_families import FAMILIES, family_params

from medialane.types.feature import MediaPayload
from medialane.types.hashing import canonical_options
from medialane.types.media import Image
from medialane.vllm_bridge.items import PlaceholderLayouts, VllmProcessor
from medialane.vllm_bridge.learned import ModelProfile

pytestmark = [
    pytest.mark.timeout(120),
    # a warning of transformers when vLLM passes a request's options
    pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning"),
]

SIZES = [(64, 64), (640, 480), (480, 640), (1500, 200), (1600, 1200)]
SMALL = canonical_options({"size": {"longest_edge": 200_000, "shortest_edge": 3136}})


@pytest.fixture(scope="module")
def predicted(family_renderer):
    """A family's profile, and its predictions as a gateway has them; created on first use."""

    @cache
    def of(name):
        profile = ModelProfile(family_renderer(name).get_mm_processor())
        return profile, profile.image_tokens

    return of


def in_prompt(engine_processor, item, options=b"{}"):
    layout = PlaceholderLayouts(engine_processor).find([MediaPayload("image", "", item.header, (), item.size)], options)
    return min(len(update.content.full) for update in layout.updates["image"][0])


@pytest.mark.parametrize("name", family_params())
def test_families_predicting_image_tokens(predicted, name):
    assert predicted(name)[1].is_trusted == ("tokens" in FAMILIES[name].predicted)


@pytest.mark.parametrize("name", family_params(predicted="tokens"))
def test_predicted_cost_never_exceeds_the_actual(predicted, name):
    profile, tokens = predicted(name)
    heavy = VllmProcessor(profile.processor)
    for width, height in SIZES:
        item = heavy.process(Image(np.zeros((height, width, 3), np.uint8)), b"{}")
        cost = tokens.cost((width, height), b"{}")
        actual, num_bytes = in_prompt(profile.processor, item), sum(spec.nbytes for spec in item.specs)
        assert cost.num_tokens <= actual
        assert cost.num_bytes in (0, num_bytes)
        assert bool(cost.num_bytes) == bool(cost.num_pixels) == ("bytes" in FAMILIES[name].predicted)
        if FAMILIES[name].has_pixel_limits:
            assert cost.num_tokens == actual


def test_options_that_shrink_an_image_are_considered(predicted):
    profile, tokens = predicted("qwen2_5_vl")
    item = VllmProcessor(profile.processor).process(Image(np.zeros((700, 700, 3), np.uint8)), SMALL)
    assert tokens.min_tokens((700, 700), SMALL) == in_prompt(profile.processor, item, SMALL)


@pytest.mark.parametrize(
    ("options", "num_pixels"),
    [({"min_pixels": 40_000_000}, 40_000_000), ({"size": {"shortest_edge": 9, "longest_edge": 10**9}}, 1600 * 1200)],
)
def test_options_that_widen_an_image_are_considered(predicted, options, num_pixels):
    """A token is 28x28 pixels, each as three bytes in two frames."""
    cost = predicted("qwen2_5_vl")[1].cost((1600, 1200), canonical_options(options))
    assert cost.num_tokens == pytest.approx(num_pixels / 28**2, rel=0.03)
    assert cost.num_bytes == cost.num_tokens * 28 * 28 * 3 * 2
    assert cost.num_pixels == cost.num_tokens * 28 * 28


@pytest.mark.parametrize(("name", "side"), [("llava", 112), ("gemma3", 112), ("paligemma", 112)])
def test_pixels_that_a_model_uses_are_those_of_its_input(predicted, name, side):
    assert predicted(name)[1].cost((4960, 7016), b"{}").num_pixels == side**2


@pytest.mark.parametrize(
    "options", [{"do_resize": False}, {"anything": 1}, {"size": "large"}, {"size": {"longest_edge": -1}}]
)
def test_unknown_options_give_no_prediction(predicted, options):
    assert predicted("qwen2_5_vl")[1].cost((7000, 7000), canonical_options(options)) is None


@pytest.mark.parametrize("size", [(1, 100_000), (0, 0)])
def test_size_unsupported_by_the_family_is_left_to_its_processor(predicted, size):
    assert predicted("qwen2_5_vl")[1].cost(size, b"{}") is None


def too_many(*, image_width, image_height):
    return 100_000


def broken(*, image_width, image_height):
    raise NameError("a bug of the family")


@pytest.mark.parametrize("count", [too_many, broken])
def test_prediction_that_is_not_confirmed_is_not_used(predicted, count):
    processor = copy.copy(predicted("qwen2_5_vl")[0].processor)
    processor.info = copy.copy(processor.info)
    processor.info.get_num_image_tokens = count
    tokens = ModelProfile(processor).image_tokens
    assert not tokens.is_trusted
    assert tokens.cost((7000, 7000), b"{}") is None


@pytest.mark.parametrize(
    "options", [{"return_tensors": "np"}, {"return_tensors": "nonsense"}, {"patch_size": "x"}, {"merge_size": 0}]
)
def test_options_that_break_a_processor_are_client_errors(predicted, options):
    from medialane.types.errors import InvalidRequest

    with pytest.raises(InvalidRequest):
        VllmProcessor(predicted("qwen2_5_vl")[0].processor).process(
            Image(np.zeros((64, 64, 3), np.uint8)), canonical_options(options)
        )
