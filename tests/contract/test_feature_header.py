"""Our header of a processed item, compared with vLLM's own types."""

from typing import get_args

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    nested_tensors_equal,
)

from medialane.types.errors import FeatureUnsupported, InvalidFeature
from medialane.types.tensor import Dtype
from medialane.vllm_bridge.items import decode_item, decode_item_without_tensors, encode_item
from medialane.vllm_bridge.items.features import INLINE_BYTES, check_tensors
from medialane.vllm_bridge.seams.stand_ins import ValueUnknown

DTYPES = get_args(Dtype)


def item(**fields):
    return MultiModalKwargsItem({k: MultiModalFieldElem(data=d, field=f) for k, (d, f) in fields.items()})


def equal(a: MultiModalKwargsItem, b: MultiModalKwargsItem) -> bool:
    return a.keys() == b.keys() and all(
        nested_tensors_equal(a[k].data, b[k].data, check_dtype=True) and a[k].field == b[k].field for k in a
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (300, 700)])
def test_item_round_trips(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    original = item(
        a=(tensor, MultiModalBatchedField(keep_on_cpu=True)),
        b=(tensor, MultiModalFlatField(slices=[slice(0, 3), slice(3, 9)], dim=1)),
        c=(tensor, MultiModalFlatField(slices=[[slice(None), slice(1, 2)]])),
        d=([tensor, [tensor, 2.5]], MultiModalSharedField(batch_size=3)),
    )
    header, _specs, buffers = encode_item(original)
    assert equal(decode_item(header, buffers), original)


def test_large_tensors_are_views_of_the_input_bytes():
    original = item(pixels=(torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8), MultiModalBatchedField()))
    header, _, (buffer,) = encode_item(original)
    arena = bytearray(buffer)
    decoded = decode_item(header, [memoryview(arena)])
    arena[7] = 9
    assert decoded["pixels"].data[7] == 9


def test_tensor_over_a_read_only_mapping_does_not_warn():
    original = item(pixels=(torch.ones(INLINE_BYTES + 1, dtype=torch.uint8), MultiModalBatchedField()))
    header, _, (buffer,) = encode_item(original)
    assert decode_item(header, [memoryview(bytes(buffer))])["pixels"].data.sum() == INLINE_BYTES + 1


def test_strided_view_is_made_contiguous():
    strided = torch.arange(INLINE_BYTES).view(64, -1).t()
    header, _, buffers = encode_item(item(x=(strided, MultiModalBatchedField())))
    assert torch.equal(decode_item(header, buffers)["x"].data, strided)


def test_header_contains_small_tensors_and_shapes_of_large_ones():
    original = item(
        grid=(torch.tensor([1, 4, 6]), MultiModalBatchedField()),
        pixels=(torch.ones(100, 1176, dtype=torch.uint8), MultiModalBatchedField()),
    )
    header, _, _ = encode_item(original)
    assembled = decode_item_without_tensors(header)
    assert assembled["grid"].data.tolist() == [1, 4, 6]
    assert assembled["pixels"].data.shape == (100, 1176)
    with pytest.raises(ValueUnknown):
        assembled["pixels"].data.sum().item()


def test_items_of_one_header_share_only_its_contents():
    pixels = torch.ones(100, 1176, dtype=torch.uint8)
    original = item(grid=(torch.tensor([1, 4, 6]), MultiModalBatchedField()), pixels=(pixels, MultiModalBatchedField()))
    header, _, (buffer,) = encode_item(original)
    one, other = (decode_item(header, [memoryview(bytes(buffer))]) for _ in range(2))
    assert one["grid"].data is other["grid"].data
    assert one["pixels"].data.data_ptr() != other["pixels"].data.data_ptr()
    one["grid"].data = None
    assert other["grid"].data.tolist() == [1, 4, 6]


@pytest.mark.parametrize("datas", [[], [b"x" * 99], [b"x" * (INLINE_BYTES * 4 + 4)]], ids=["none", "short", "long"])
def test_mismatched_tensors_are_detected_without_building_the_item(datas):
    header, _, (buffer,) = encode_item(item(x=(torch.zeros(INLINE_BYTES), MultiModalBatchedField())))
    check_tensors(header, [buffer])
    with pytest.raises(InvalidFeature):
        check_tensors(header, list(map(memoryview, datas)))


@pytest.mark.parametrize(
    "damage", [lambda h: h[:-1], lambda h: b"", lambda h: b"\xc1" + h, lambda h: h.replace(b"batched", b"pickled")]
)
def test_corrupt_header_raises_invalid_feature(damage):
    header, _, buffers = encode_item(item(x=(torch.zeros(9), MultiModalBatchedField())))
    with pytest.raises(InvalidFeature):
        decode_item(damage(header), buffers)


def test_missing_or_short_tensor_raises_invalid_feature():
    header, _, (buffer,) = encode_item(item(x=(torch.zeros(INLINE_BYTES), MultiModalBatchedField())))
    with pytest.raises(InvalidFeature):
        decode_item(header, [])
    with pytest.raises(InvalidFeature):
        decode_item(header, [buffer[:-1]])


def test_dtype_without_wire_format_is_rejected():
    with pytest.raises(FeatureUnsupported, match="bits8"):
        encode_item(item(x=(torch.zeros(2, dtype=torch.uint8).view(torch.bits8), MultiModalBatchedField())))
