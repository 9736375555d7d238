"""Processed items of clients: what vLLM sends is read, and used only if the model could have made it."""

import base64
import json

import msgspec
import pytest
import torch
from file_less_processors import without_files
from prompt_maker import PromptMaker, bytes_of, pixels
from safetensors.torch import load
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalFlatField, MultiModalKwargsItem

from medialane.types.errors import InvalidFeature
from medialane.types.feature import Feature, PlaceholderRange
from medialane.vllm_bridge.frontend.client_features import safetensors_of
from medialane.vllm_bridge.items import decode_item
from medialane.vllm_bridge.learned import ModelProfile, TensorsReader, normalization_of
from vllm_configs import model_config


@pytest.fixture(scope="module")
def profile(renderer):
    return ModelProfile(renderer.get_mm_processor())


@pytest.fixture(scope="module")
def reader(profile):
    return TensorsReader(profile)


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest.fixture(scope="module")
def prompt(maker):
    return maker.inline(pixels(300, 200), pixels(500, 400, 1))


@pytest.fixture
def items(prompt):
    return [decode_item(f.header, data) for f, data in zip(prompt.features, bytes_of(prompt), strict=True)]


def sent(item):
    return base64.b64decode(encode_mm_kwargs_item(item))


def encoded(fields):
    return msgspec.msgpack.encode({name: {"data": data, "field": ["batched", {}]} for name, data in fields.items()})


def raw(data):
    return msgspec.msgpack.Ext(3, data)


def test_item_is_that_of_the_feature_it_was_made_of_and_of_no_other(reader, prompt, items):
    for number, item in enumerate(items):
        read = reader.read("image", sent(item))
        for other, tensors in enumerate(bytes_of(prompt)):
            assert reader.equals(read, prompt.features[other].header, tensors) == (number == other)


def test_place_of_the_item_in_its_request_does_not_matter(reader, items):
    """In vLLM, the fields of all items of a request have their slices in common."""
    rows = len(items[0]["pixel_values"].data)
    field = MultiModalFlatField(slices=[slice(0, 8), slice(8, 8 + rows)])
    moved = {**items[0], "pixel_values": MultiModalFieldElem(items[0]["pixel_values"].data, field)}
    in_reverse = dict(reversed(moved.items()))
    assert (
        reader.read("image", sent(MultiModalKwargsItem(in_reverse))).sent == reader.read("image", sent(items[0])).sent
    )


def test_item_of_the_model_is_stored_as_a_preparer_would(reader, prompt, items):
    made = reader.check(reader.read("image", sent(items[0])))
    own = decode_item(prompt.features[0].header, bytes_of(prompt)[0])
    stored = decode_item(made.header, made.buffers)
    assert stored.keys() == own.keys()
    assert all(torch.equal(stored[name].data, own[name].data) for name in own)


def test_placeholder_of_an_item_of_unknown_size_is_found(profile, reader, prompt, items):
    """The true size is not known, which does not matter for these families."""
    made = reader.check(reader.read("image", sent(items[0])))
    feature = Feature("image", "a" * 64, made.header, (), made.size)
    place = prompt.features[0].placeholder
    placed = profile.assembler(max_tokens=10_000).place(prompt.expanded_token_ids, (feature,), [place])
    assert placed == [place]


@pytest.mark.parametrize("count", [-1, 1])
def test_placeholder_has_a_token_for_each_embedding(reader, prompt, items, count):
    read = reader.read("image", sent(items[0]))
    length = prompt.features[0].placeholder.length
    reader.check_placed(read, PlaceholderRange(0, length))
    with pytest.raises(InvalidFeature, match="placeholder tokens"):
        reader.check_placed(read, PlaceholderRange(0, length + count))


PIXELS = ["uint8", [4, 2], raw(bytes(8))]

MALFORMED = {
    "no msgpack": b"\xc1" * 50,
    "no object": msgspec.msgpack.encode([1]),
    "nested deeply": b"\x91" * 100_000,
    "nested in a field": b"\x81\xacpixel_values\x82\xa4data" + b"\x91" * 5000 + b"\xc0\xa5field\xc0",
    "many fields": encoded({f"f{n}": 1 for n in range(65)}),
    "many tensors": encoded({"pixel_values": [PIXELS] * 3000}),
    "a million numbers": encoded({"pixel_values": [1] * 1_000_000}),
    "many tensors in short lists": encoded({"pixel_values": [[PIXELS] * 200] * 200}),
    "many numbers in short lists": encoded({"pixel_values": [[1] * 2000] * 10}),
    "an unknown field": encoded({"other": PIXELS}),
    "an unknown dtype": encoded({"pixel_values": ["object", [8], raw(bytes(8))]}),
    "an attribute of torch": encoded({"pixel_values": ["load", [8], raw(bytes(8))]}),
    "a pickle": encoded({"pixel_values": ["uint8", [4], msgspec.msgpack.Ext(1, b"cos\n")]}),
    "another extension": encoded({"pixel_values": ["uint8", [4], msgspec.msgpack.Ext(2, b"cos\n")]}),
    "a buffer beside it": encoded({"pixel_values": ["uint8", [4], 0]}),
    "shared memory": encoded({"pixel_values": ["uint8", [4], {"name": "psm_0"}]}),
    "a negative dimension": encoded({"pixel_values": ["uint8", [-1, 4], raw(bytes(4))]}),
    "a huge shape": encoded({"pixel_values": ["uint8", [2**40, 2**40], raw(bytes(4))]}),
    "a short tensor": encoded({"pixel_values": ["float32", [4], raw(bytes(15))]}),
    "no bytes": encoded({"pixel_values": ["float32", [4]]}),
    "a string": encoded({"pixel_values": "uint8"}),
    "a truth value of 2": encoded({"pixel_values": ["bool", [2], raw(b"\x01\x02")]}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_item_is_refused(reader, name):
    with pytest.raises(InvalidFeature):
        reader.read("image", MALFORMED[name])


@pytest.mark.parametrize("name", ["many tensors in short lists", "many numbers in short lists"])
def test_values_of_all_lists_are_counted(reader, name):
    with pytest.raises(InvalidFeature) as error:
        reader.read("image", MALFORMED[name])
    assert "more than" in str(error.value.__cause__)


def changed(item, **fields):
    return MultiModalKwargsItem({n: MultiModalFieldElem(fields.get(n, e.data), e.field) for n, e in item.items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda item: changed(item, pixel_values=item["pixel_values"].data[:-4]),
        lambda item: changed(item, pixel_values=item["pixel_values"].data.float()),
        lambda item: changed(item, pixel_values=item["pixel_values"].data[:, :-1].contiguous()),
        lambda item: changed(item, image_grid_thw=torch.tensor([1, 8, 8])),
        lambda item: changed(item, image_grid_thw=item["image_grid_thw"].data * 2**30),
        lambda item: changed(item, image_grid_thw=item["image_grid_thw"].data.flip(0)),
        lambda item: MultiModalKwargsItem({"image_grid_thw": item["image_grid_thw"]}),
    ],
)
def test_item_that_no_processor_makes_is_refused(reader, items, change):
    with pytest.raises(InvalidFeature):
        reader.check(reader.read("image", sent(change(items[0]))))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
def test_number_that_is_not_finite_is_refused_by_name(reader, items, name, value):
    data = items[0][name].data.float()
    data.view(-1)[-1] = float(value)
    with pytest.raises(InvalidFeature, match=f"image {name}: NaN or infinite") as raised:
        reader.check(reader.read("image", sent(changed(items[0], **{name: data}))))
    assert raised.value.status == 400


def test_modality_without_samples_is_refused(reader, items):
    with pytest.raises(InvalidFeature):
        reader.check(reader.read("audio", sent(items[0])))


def test_file_of_a_feature_has_its_tensors(profile, prompt):
    made, tensors = prompt.features[0], bytes_of(prompt)[0]
    feature = Feature("image", made.mm_hash, made.header, (), made.size)
    file = b"".join(safetensors_of(feature, tensors, {"mm_hash": made.mm_hash}))
    found, own = load(file), decode_item(made.header, tensors)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name].data) for name in own)
    assert json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"] == {"mm_hash": made.mm_hash}


def test_pixels_that_the_engine_normalises_are_said_to_be_raw(profile):
    described = normalization_of(profile.processor, "image")
    assert described["normalized"] is False
    assert len(described["image_mean"]) == len(described["image_std"]) == 3
    assert described["rescale_factor"] == pytest.approx(1 / 255)


def test_family_without_a_hugging_face_processor_says_nothing_of_normalisation(tiny_model):
    config = model_config(tiny_model, "--max-model-len=8192", "--no-mm-device-do-normalize")
    processor = without_files(MULTIMODAL_REGISTRY.create_processor(config))
    assert normalization_of(processor, "video") == {"normalized": False}
