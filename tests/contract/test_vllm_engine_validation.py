"""Features inconsistent in themselves or with their prompt are rejected before the engine."""

import time

import msgspec
import pytest
import torch
from prompt_maker import PromptMaker, bytes_of, pixels, with_feature
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from medialane.types.errors import InvalidFeature, PromptRejected
from medialane.types.feature import PlaceholderRange
from medialane.types.media import MediaSize
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.vllm_bridge.items import PlaceholderLayouts, decode_item, encode_item
from medialane.vllm_bridge.learned import ModelProfile
from medialane.vllm_bridge.learned.validation import check_ranges


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest.fixture(scope="module")
def checker(renderer):
    return ModelProfile(renderer.get_mm_processor()).checker


@pytest.fixture(scope="module")
def prompt(maker):
    return maker.inline(pixels(300, 200), pixels(500, 400, 1))


def items_of(prompt):
    return [decode_item(f.header, data) for f, data in zip(prompt.features, bytes_of(prompt), strict=True)]


def changed(item, **fields):
    """The item with the data of some fields replaced (None: without the field)."""
    elems = {name: MultiModalFieldElem(fields.get(name, e.data), e.field) for name, e in item.items()}
    return MultiModalKwargsItem({name: e for name, e in elems.items() if e.data is not None})


@pytest.mark.parametrize(
    "sizes", [[(1024, 768)], [(28, 28)], [(3, 333)], [(200, 300), (640, 480), (97, 1211)]], ids=str
)
def test_processor_output_is_accepted(checker, maker, sizes):
    prompt = maker.inline(*[pixels(*size, seed=i) for i, size in enumerate(sizes)])
    checker.check(prompt, items_of(prompt))


def test_processor_options_affect_the_expected_layout(checker, maker):
    prompt = maker.inline(pixels(800, 600), options=b'{"size":{"longest_edge":40000,"shortest_edge":3136}}')
    assert len(prompt.token_ids) < len(maker.inline(pixels(800, 600)).token_ids)
    checker.check(prompt, items_of(prompt))


def test_prompt_without_features_is_accepted(checker, prompt):
    checker.check(msgspec.structs.replace(prompt, features=()), [])


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("rows", lambda item: changed(item, pixel_values=item["pixel_values"].data[:-4])),
        ("rows", lambda item: changed(item, pixel_values=torch.cat([item["pixel_values"].data] * 2))),
        ("rows", lambda item: changed(item, image_grid_thw=torch.tensor([1, 8, 8]))),
        ("shape", lambda item: changed(item, pixel_values=item["pixel_values"].data[:, :-1])),
        ("dimensions", lambda item: changed(item, pixel_values=item["pixel_values"].data.view(-1))),
        ("float32", lambda item: changed(item, pixel_values=item["pixel_values"].data.float())),
        ("int32", lambda item: changed(item, image_grid_thw=item["image_grid_thw"].data.int())),
        ("negative", lambda item: changed(item, image_grid_thw=-item["image_grid_thw"].data)),
        ("grid", lambda item: changed(item, image_grid_thw=torch.tensor([1, 1, len(item["pixel_values"].data)]))),
        ("grid", lambda item: changed(item, image_grid_thw=torch.tensor([0, 2, 2]))),
        ("grid", lambda item: changed(item, image_grid_thw=torch.tensor([2, 2]))),
        ("fields", lambda item: changed(item, pixel_values=None)),
        ("fields", lambda item: MultiModalKwargsItem({**item, "more": item["image_grid_thw"]})),
        ("kind", lambda item: MultiModalKwargsItem({**item, "pixel_values": _as_batched(item)})),
        ("list", lambda item: changed(item, pixel_values=list(item["pixel_values"].data))),
    ],
)
def test_inconsistent_item_is_rejected(checker, prompt, what, change):
    checker.check(prompt, items_of(prompt))  # the cache of valid ones must not bypass validation
    item = change(items_of(prompt)[0])
    header, specs, buffers = encode_item(item)
    tensors = tuple(InlineTensor(spec, bytes(data)) for spec, data in zip(specs, buffers, strict=True))
    contradicting = with_feature(prompt, header=header, tensors=tensors)
    for _ in range(2):
        with pytest.raises(InvalidFeature, match=what):
            checker.check(contradicting, items_of(contradicting))


def test_small_tensor_outside_the_header_is_rejected(prompt):
    """Equal headers would not mean equal items."""
    header = msgspec.msgpack.decode(prompt.features[0].header)
    grid = next(field for field in header["fields"] if field["name"] == "image_grid_thw")
    tensor = InlineTensor(msgspec.convert(grid["value"]["spec"], TensorSpec), grid["value"].pop("data"))
    grid["value"].update(type="large", index=1)
    hidden = with_feature(prompt, header=msgspec.msgpack.encode(header), tensors=(*prompt.features[0].tensors, tensor))
    with pytest.raises(InvalidFeature, match="outside its feature's header"):
        items_of(hidden)


def test_validation_cache_is_bounded(renderer, maker):
    layouts = PlaceholderLayouts(renderer.get_mm_processor(), max_bytes=20_000)
    prompts = [maker.inline(pixels(width, 280)) for width in range(28, 28 * 60, 28)]
    for prompt in prompts:
        layouts.find(prompt.features, b"{}")
    computed = []
    for name in (-1, 0):
        layouts.find(prompts[name].features, b"{}", check=lambda name=name: computed.append(name))
    assert computed == [0], "the last is cached, the first no longer"


def test_processor_is_queried_once_per_item_size(renderer, maker):
    layouts = PlaceholderLayouts(renderer.get_mm_processor())
    checks = []
    for seed in range(3):
        layouts.find(maker.inline(pixels(300, 200, seed)).features, b"{}", check=lambda: checks.append(1))
    layouts.find(maker.inline(pixels(300, 200), pixels(300, 200)).features, b"{}", check=lambda: checks.append(2))
    assert checks == [1, 2]


def _as_batched(item):
    return MultiModalFieldElem(item["pixel_values"].data, MultiModalBatchedField())


def place_of(prompt, index=0):
    return prompt.features[index].placeholder


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("not those", lambda p: PlaceholderRange(offset=p.offset, length=p.length - 1)),
        ("not those", lambda p: PlaceholderRange(offset=p.offset, length=p.length + 1)),
        ("not those", lambda p: PlaceholderRange(offset=p.offset - 1, length=p.length)),
        (
            "not those",
            lambda p: PlaceholderRange(offset=p.offset, length=p.length, is_embed=b"\0" * p.length),
        ),
        ("the prompt at", lambda p: PlaceholderRange(offset=p.offset + p.length + 500, length=p.length)),
    ],
)
def test_placeholder_not_matching_its_feature_is_rejected(checker, prompt, what, change):
    with pytest.raises(InvalidFeature, match=what):
        checker.check(with_feature(prompt, placeholder=change(place_of(prompt))), items_of(prompt))


def test_overlapping_placeholders_are_rejected(checker, prompt):
    first = place_of(prompt)
    with pytest.raises(InvalidFeature, match="overlaps another"):
        checker.check(
            with_feature(prompt, 1, placeholder=PlaceholderRange(first.end - 1, first.length)), items_of(prompt)
        )


def test_misordered_placeholders_of_one_modality_are_rejected(checker, prompt):
    places = place_of(prompt), place_of(prompt, 1)
    swapped = with_feature(with_feature(prompt, 0, placeholder=places[1]), 1, placeholder=places[0])
    with pytest.raises(InvalidFeature, match="is out of order"):
        checker.check(swapped, items_of(swapped))


def test_placeholder_beyond_the_prompt_is_rejected(checker, prompt):
    last = place_of(prompt, 1)
    beyond = PlaceholderRange(offset=len(prompt.token_ids) - last.length + 1, length=last.length)
    with pytest.raises(InvalidFeature, match="the prompt at"):
        checker.check(with_feature(prompt, 1, placeholder=beyond), items_of(prompt))


def test_misordered_features_are_rejected(checker, prompt):
    first, second = prompt.features
    swapped = msgspec.structs.replace(
        prompt,
        features=(
            msgspec.structs.replace(second, placeholder=first.placeholder),
            msgspec.structs.replace(first, placeholder=second.placeholder),
        ),
    )
    with pytest.raises(InvalidFeature, match="not those"):
        checker.check(swapped, items_of(swapped))


def test_prompt_with_wrong_tokens_at_the_placeholder_is_rejected(checker, prompt):
    ids = list(prompt.token_ids)
    ids[place_of(prompt).offset + 3] = 100
    with pytest.raises(InvalidFeature, match="not those"):
        checker.check(msgspec.structs.replace(prompt, token_ids=ids), items_of(prompt))


def test_unknown_modality_is_rejected(checker, prompt):
    with pytest.raises(PromptRejected, match="At most 0 audio"):
        checker.check(with_feature(prompt, modality="audio"), items_of(prompt))


def test_image_feature_is_rejected_as_video(checker, prompt):
    with pytest.raises(InvalidFeature, match="video: fields"):
        checker.check(with_feature(prompt, modality="video"), items_of(prompt))


def test_too_many_items_are_a_client_error(checker, maker):
    prompt = maker.inline(*[pixels(28, 28)] * 8)
    too_many = msgspec.structs.replace(prompt, features=(*prompt.features, *prompt.features[-1:]))
    with pytest.raises(InvalidFeature, match="overlaps another"):
        checker.check(too_many, items_of(too_many))
    last = too_many.features[-1]
    moved = PlaceholderRange(offset=last.placeholder.end, length=last.placeholder.length)
    longer = msgspec.structs.replace(with_feature(too_many, 8, placeholder=moved), token_ids=prompt.token_ids * 2)
    with pytest.raises(PromptRejected, match="At most 8 image"):
        checker.check(longer, items_of(longer))


def test_wrong_size_does_not_bypass_validation(checker, prompt):
    """This family counts tokens by the grid; whatever size is claimed, rows, grid and tokens must agree."""
    checker.check(with_feature(prompt, size=MediaSize(width=28, height=28)), items_of(prompt))


def test_mm_hash_must_be_usable_as_a_key(checker, prompt):
    for mm_hash in ("", "x" * 1000):
        with pytest.raises(InvalidFeature, match="mm_hash"):
            checker.check(with_feature(prompt, mm_hash=mm_hash), items_of(prompt))


def test_validating_three_photos_stays_within_the_time_budget(checker, maker):
    prompt = maker.inline(*[pixels(1024, 768, seed=i) for i in range(3)])
    items = items_of(prompt)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        checker.check(prompt, items)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.001  # 0.2 ms, since sizes like these were seen; else 1 to 2 ms


def test_decoded_item_can_be_encoded_again(prompt):
    """The items changed by the tests above are real: encoding them gives the transmitted header."""
    item = items_of(prompt)[0]
    assert encode_item(item)[0] == prompt.features[0].header


def test_adjacent_ranges_are_accepted():
    check_ranges(10, [PlaceholderRange(offset=0, length=4), PlaceholderRange(offset=4, length=6)])
    with pytest.raises(InvalidFeature):
        check_ranges(10, [PlaceholderRange(offset=0, length=5), PlaceholderRange(offset=4, length=6)])
