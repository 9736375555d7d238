"""Saved tensors are read as torch and numpy read them; nothing in them is run, and nothing grows beyond what came."""

import base64
import io
import os
import pickle
import random
import struct
import time
import tracemalloc
import zipfile

import msgspec
import numpy as np
import pytest
import torch

from medialane.media import read_embeds
from medialane.media.embeds import MAX_NUMBERS, MAX_RECORDS, read_tensor
from medialane.types.errors import (
    EmptyMedia,
    InvalidBase64,
    InvalidEmbeds,
    InvalidFeature,
    InvalidRequest,
    MediaTooLarge,
)
from medialane.types.tensor import UNNAMED, TensorSpec, decode_embeds, encode_embeds

MIB = 1 << 20


def saved(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def tensor_of(found) -> torch.Tensor:
    return torch.frombuffer(bytearray(found.data), dtype=getattr(torch, found.spec.dtype)).view(found.spec.shape)


#: The types of vLLM's embeddings, and of grids.
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]

VALUES = torch.arange(24).view(4, 6) % 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_round_trips(dtype):
    tensor = VALUES.to(getattr(torch, dtype))
    assert torch.equal(tensor_of(read_tensor(saved(tensor))), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.rand(2, 3)),
        torch.rand(6, 8)[1:, ::2],
        torch.rand(6, 8).T,
        torch.rand(5, 3, requires_grad=True),
        torch.tensor(3.5),
        torch.rand(1, 2, 1, 3),
        torch.rand(1000, 64)[17:19],
    ],
    ids=lambda tensor: f"{type(tensor).__name__}{tuple(tensor.shape)}",
)
def test_every_memory_layout_round_trips(tensor):
    assert torch.equal(tensor_of(read_tensor(saved(tensor))), tensor.detach())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numpy_format_is_accepted(dtype, order):
    array = np.asarray(VALUES.numpy().astype(dtype), order=order)
    assert np.array_equal(tensor_of(read_tensor(npy(array))).numpy(), array)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


class Grower:
    """What `torch.load(weights_only=True)` would call: 8 GiB of zeros."""

    def __reduce__(self):
        return bytearray, (8 << 30,)


def archive(pickled: bytes, *, storage=b"\0" * 16, compression=zipfile.ZIP_STORED, more=0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        made.writestr("a/data.pkl", pickled)
        made.writestr("a/data/0", storage)
        for number in range(more):
            made.writestr(f"a/x{number}", b"")
    return buffer.getvalue()


def layout(dtype="FloatStorage", key="0", num=4, offset=0, shape=(2, 2), strides=(2, 1)) -> bytes:
    """The pickle that torch would write."""
    assert max(num, offset, *shape, *strides) < 1 << 31

    def number(n):
        return b"J" + struct.pack("<i", n)

    def text(s):
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    def tuple_of(numbers):
        return b"(" + b"".join(map(number, numbers)) + b"t"

    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        + text("storage")
        + f"ctorch\n{dtype}\n".encode()
        + text(key)
        + text("cpu")
        + number(num)
        + b"tQ"
        + number(offset)
        + tuple_of(shape)
        + tuple_of(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


def test_handmade_layout_is_read():
    assert read_tensor(archive(layout())).spec == TensorSpec("float32", (2, 2))


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "bomb": saved(Bomb()),
    "old bomb": pickle.dumps(Bomb()),
    "bomb beside a tensor": saved([torch.zeros(2), Bomb()]),
    "grower": saved(Grower()),
    "old format": saved(VALUES, _use_new_zipfile_serialization=False),
    "list": saved([VALUES]),
    "dict": saved({"image_embeds": VALUES}),
    "number": saved(3),
    "sparse": saved(torch.eye(3).to_sparse()),
    "expanded": saved(torch.zeros(1).expand(1 << 20)),
    "empty": saved(torch.zeros(0, 4)),
    "quantized": saved(torch.zeros(2).to(torch.complex64)),
    "module": archive(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."),
    "stack global": archive(pickle.dumps(Bomb(), protocol=4)),
    "two results": archive(b"\x80\x02" + b"K\x01K\x02."),
    "no stop": archive(layout()[:-1]),
    "not a pickle": archive(b"\xff\xfe"),
    "long": archive(b"K\x01" * 4000),
    "memo that is not": archive(b"\x80\x02h\x07."),
    "larger than its storage": archive(layout(shape=(2, 3))),
    "beyond its storage": archive(layout(offset=1)),
    "strides beyond": archive(layout(strides=(3, 1))),
    "negative stride": archive(layout(strides=(-1, 1))),
    "negative offset": archive(layout(offset=-1)),
    "negative shape": archive(layout(shape=(-2, -2))),
    "no stride": archive(layout(shape=(1 << 30, 1 << 30), strides=(0, 0))),
    "storage said to be longer": archive(layout(num=1 << 30, shape=(1 << 15, 1 << 15), strides=(1 << 15, 1))),
    "other storage": archive(layout(key="../../etc/passwd")),
    "unknown storage": archive(layout(dtype="UntypedStorage")),
    "ranks differ": archive(layout(shape=(2, 2), strides=(1,))),
    "many dimensions": archive(layout(num=4, shape=(1,) * 9, strides=(1,) * 9)),
    "compressed": archive(layout(num=4 * MIB), storage=b"\0" * 16 * MIB, compression=zipfile.ZIP_DEFLATED),
    "many records": archive(layout(), more=MAX_RECORDS),
    "two tensors": archive(layout()) + archive(layout()),
    "numpy objects": npy(np.array([{}, Bomb()], dtype=object)),
    "numpy records": npy(np.zeros(2, [("a", "i4")])),
    "numpy complex": npy(np.zeros(2, complex)),
    "numpy big-endian": npy(np.zeros(2, ">f4")),
    "numpy cut off": npy(np.zeros(20))[:-1],
    "numpy said to be longer": npy(np.zeros(20)).replace(b"(20,)", b"(1<30)"),
    "numpy huge": npy(np.zeros(20)).replace(b"(20,), }       ", b"(200000000,), }"),
    "numpy nested": b"\x93NUMPY\x01\x00\xf6\x1f" + b"(" * 8182,
    "numpy version": b"\x93NUMPY\x09\x00" + b"x" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_rejected_without_executing_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "two tensors":  # a second archive behind the first is what zip readers see: one tensor
        assert read_tensor(HOSTILE[name]).spec == TensorSpec("float32", (2, 2))
        return
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(InvalidEmbeds) as raised:
        read_tensor(HOSTILE[name])
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1
    assert peak < 4 * MIB + 2 * len(HOSTILE[name])
    assert list(tmp_path.iterdir()) == []
    assert len(raised.value.message) < 100


def test_mutated_bytes_give_a_tensor_or_are_rejected():
    chance = random.Random(1)
    good = [saved(VALUES.float()), npy(VALUES.numpy()), archive(layout())]
    for _ in range(1500):
        data = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = read_tensor(bytes(data))
        except InvalidEmbeds:
            continue
        assert 0 < len(found.data) == found.spec.nbytes <= len(data)


def encoded(tensor) -> bytes:
    return base64.b64encode(saved(tensor))


def test_item_of_one_tensor_or_of_named_tensors():
    (single,) = decode_embeds(read_embeds({UNNAMED: encoded(VALUES)}, "p", MIB)).fields.items()
    assert single[0] == UNNAMED
    named = {"image_embeds": encoded(VALUES.float()), "image_grid_thw": msgspec.Raw(b"[1, 4, 6]")}
    fields = decode_embeds(read_embeds(named, "p", MIB)).fields
    assert torch.equal(tensor_of(fields["image_embeds"]), VALUES.float())
    assert tensor_of(fields["image_grid_thw"]).tolist() == [1, 4, 6]
    assert fields["image_grid_thw"].spec.dtype == "int64"


def test_equal_items_give_equal_documents_for_any_field_order():
    fields = {"a": encoded(VALUES), "b": msgspec.Raw(b"[0.5, 2]")}
    document = read_embeds(fields, "p", MIB)
    assert document == read_embeds(dict(reversed(fields.items())), "p", MIB)
    assert document == encode_embeds(decode_embeds(document))
    assert decode_embeds(document).fields["b"].spec.dtype == "float64"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({UNNAMED: b"A" * 11}, InvalidBase64, "p"),
        ({UNNAMED: b""}, EmptyMedia, "p"),
        ({UNNAMED: b"QUJD"}, InvalidEmbeds, "p"),
        ({"x": b"A" * (MIB + 1)}, MediaTooLarge, "p.x"),
        ({"x": encoded(torch.zeros(150_000)), "y": encoded(torch.zeros(150_000))}, MediaTooLarge, "p.y"),
        ({"n" * 5000: msgspec.Raw(b'["x"]')}, InvalidEmbeds, "p." + "n" * 64),
        ({"n": msgspec.Raw(b"[]")}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b"[true]")}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b"[1e999]")}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b"[9223372036854775808]")}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b"[1,[2]]")}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b'{"a":1}')}, InvalidEmbeds, "p.n"),
        ({"n": msgspec.Raw(b"[" + b"1," * MAX_NUMBERS + b"1]")}, InvalidEmbeds, "p.n"),
        ({}, InvalidEmbeds, "p"),
        ({str(n): msgspec.Raw(b"[1]") for n in range(9)}, InvalidEmbeds, "p"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_error_names_the_problem(fields, error, param):
    with pytest.raises(InvalidRequest) as raised:
        read_embeds(fields, "p", MIB)
    assert (type(raised.value), raised.value.param) == (error, param)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_number_that_is_not_finite_is_refused(dtype, value, at):
    """The engine would answer with nothing but NaN, and others' requests of its batch might."""
    tensor = torch.full((80_000,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(tensor_of(read_tensor(saved(tensor))), tensor)
    tensor[at] = float(value)
    for data in [saved(tensor)] if dtype == torch.bfloat16 else [saved(tensor), npy(tensor.numpy())]:
        with pytest.raises(InvalidEmbeds, match="NaN or infinite"):
            read_tensor(data)


@pytest.mark.parametrize("data", [b"", b"medialane-embeds-1\0", b"medialane-embeds-1\0\x81\xa1x", b"\x89PNG"])
def test_invalid_document_bytes_are_rejected(data):
    with pytest.raises(InvalidFeature):
        decode_embeds(data)
