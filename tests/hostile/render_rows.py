"""Requests that are rendered only: every limit holds, above all where nothing need be decoded; and their way back."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import media_files as m
import msgspec
from audio_rows import AUDIO_ROWS
from corpus import Body, Row, World, chat, data_url, media_part
from data_rows import DATA_ROWS
from image_rows import IMAGE_ROWS
from url_rows import URL_ROWS
from video_rows import VIDEO_ROWS

CHAT_RENDER = "/v1/chat/completions/render"
RESPONSES_RENDER = "/v1/responses/render"
MESSAGES_RENDER = "/v1/messages/render"
COMPLETIONS_RENDER = "/v1/completions/render"
CHAT_DERENDER = "/v1/chat/completions/derender"
COMPLETIONS_DERENDER = "/v1/completions/derender"
GENERATE = "/inference/v1/generate"

_LIMITS = frozenset(
    (
        "image_too_large", "image_too_complex", "video_too_long", "audio_too_long", "too_many_media_items",
        "media_too_large", "unsupported_media_type", "empty_media",
    )
)  # fmt: skip
#: Of this growth none is pixels, frames or samples.
_HEADER_MIB = 64.0


def with_payload(body: Body, payload: object) -> Body:
    return lambda world: json.dumps({**json.loads(body(world)), "mm_payload": payload}).encode()


def _rendered(row: Row, payload: str = "none") -> Row:
    mib = min(row.mib, _HEADER_MIB)
    return replace(row, body=with_payload(row.body, payload), path=CHAT_RENDER, mib=mib)


def posted(**fields: object) -> Body:
    return lambda world: json.dumps({"model": world.model, **fields}).encode()


_ALL = (*IMAGE_ROWS, *VIDEO_ROWS, *AUDIO_ROWS, *DATA_ROWS)
#: One of each kind of forbidden URL is enough: what reads them is the same.
_FORBIDDEN = tuple(row for row in URL_ROWS if row.name in ("1 loopback", "10 metadata", "2 decimal"))

_PIXELS = data_url(m.png_claiming(65_000, 65_000))
_RAW = _PIXELS.partition(",")[2]
_SOURCE = {"type": "base64", "media_type": "image/png", "data": _RAW}


def _input(part: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [part]}]


_OTHER_APIS = (
    Row(
        "+ image in a response",
        posted(input=_input({"type": "input_image", "image_url": _PIXELS}), mm_payload="none"),
        413,
        "image_too_large",
        path=RESPONSES_RENDER,
    ),
    Row(
        "+ URL in a response",
        posted(input=_input({"type": "input_image", "image_url": "http://127.0.0.1/"})),
        400,
        "media_url_forbidden",
        path=RESPONSES_RENDER,
    ),
    Row(
        "+ image in a message",
        posted(messages=_input({"type": "image", "source": _SOURCE}), max_tokens=5),
        413,
        "image_too_large",
        path=MESSAGES_RENDER,
    ),
    Row("+ text of 3 MB", posted(prompt="a" * 3_000_000), 400, 400, path=COMPLETIONS_RENDER),
    Row("+ too many token ids", posted(prompt=[[1] * 5000] * 3), 400, 400, path=COMPLETIONS_RENDER),
    Row("+ 2000 prompts", posted(prompt=["a"] * 2000), 400, "invalid_body", path=COMPLETIONS_RENDER),
    Row("+ body of 5 MB", posted(prompt="a" * 5_000_000), 413, "body_too_large", path=COMPLETIONS_RENDER),
)

_PAYLOADS = tuple(
    Row(
        f"+ payload {payload}",
        with_payload(lambda world: chat(world.model, media_part(data_url(m.picture(5100)))), payload),
        400,
        400,
        path=CHAT_RENDER,
    )
    for payload in ("pixels", 7, None, ["none"], {"a": "none"}, "")
)

RENDER_ROWS = (
    *(_rendered(row) for row in (*_ALL, *_FORBIDDEN) if row.code in _LIMITS or row in _FORBIDDEN),
    *_OTHER_APIS,
    *_PAYLOADS,
)


def _derendered(**choice: object) -> Body:
    return posted(generate_response={"request_id": "x", "choices": [{"index": 0, **choice}]})


def _logprob(**fields: object) -> Body:
    return _derendered(token_ids=[1], logprobs={"content": [{"token_id": 1, "logprob": -1.0, **fields}]})


def _streamed(world: World) -> bytes:
    chunk = {"request_id": "x", "choices": [{"index": 0, "token_ids": [1]}]}
    state = {"token_ids": [10**12], "prefix_offset": -5, "read_offset": 10**9}
    return posted(stream=True, generate_chunk=chunk, stream_state=state)(world)


_CHOICES = [{"index": 0, "token_ids": [1]}]

DERENDER_ROWS = (
    Row("+ good", _derendered(token_ids=[1, 2, 3]), 200, path=CHAT_DERENDER),
    Row("+ ids of no vocabulary", _derendered(token_ids=[10**6, 2**31, 2**70]), 200, path=CHAT_DERENDER),
    Row("+ negative ids", _derendered(token_ids=[-1]), 400, 400, path=CHAT_DERENDER),
    Row("+ ids that are no numbers", _derendered(token_ids=["a", {}, None]), 400, 400, path=CHAT_DERENDER),
    Row("+ more ids than the context", _derendered(token_ids=[5] * 10_000), 400, 400, path=CHAT_DERENDER),
    Row("+ 2 million ids", _derendered(token_ids=[5] * 2_000_000), 400, "invalid_body", path=CHAT_DERENDER),
    Row(
        "+ 10 000 choices",
        posted(generate_response={"request_id": "x", "choices": _CHOICES * 10_000}),
        400,
        "invalid_body",
        path=CHAT_DERENDER,
    ),
    Row("+ log probability of no token", _logprob(token_id=10**12), 400, 400, path=CHAT_DERENDER),
    Row("+ infinite log probability", _logprob(logprob=-float("inf")), 400, 400, path=CHAT_DERENDER),
    Row(
        "+ too many alternatives",
        _logprob(top_logprobs=[{"token_id": 1, "logprob": -1.0}] * 3000),
        400,
        400,
        path=CHAT_DERENDER,
    ),
    Row("+ state of a stream that lies", _streamed, 400, 400, path=CHAT_DERENDER),
    Row("+ nothing", posted(), 400, 400, path=CHAT_DERENDER),
    Row("+ no answers", posted(generate_responses=[]), 400, 400, path=COMPLETIONS_DERENDER),
    Row(
        "+ 10 000 answers",
        posted(generate_responses=[{"request_id": "x", "choices": _CHOICES}] * 10_000),
        400,
        "invalid_body",
        path=COMPLETIONS_DERENDER,
    ),
)


_PLACE = {"offset": 0, "length": 4}


def _generated(data: object, place: object = _PLACE, **fields: object) -> Body:
    features = {
        "mm_hashes": {"image": ["a" * 64]},
        "mm_placeholders": {"image": [place]},
        "kwargs_data": {"image": [data]},
    }
    return posted(token_ids=[6] * 8, sampling_params={"max_tokens": 3}, features=features, **fields)


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _item(**fields: object) -> str:
    encoded = {name: {"data": data, "field": ["batched", {}]} for name, data in fields.items()}
    return _encoded(msgspec.msgpack.encode(encoded))


def _raw(data: bytes, code: int = 3) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


_ROWS = ["bfloat16", [16, 1176], _raw(bytes(2 * 16 * 1176))]
_GRID = ["int64", [3], _raw(b"".join(n.to_bytes(8, "little") for n in (1, 4, 4)))]

#: Tensors of a client: none is parsed on the event loop, let alone unpickled.
_TENSORS = {
    "no msgpack": (_encoded(b"\xc1" * 50), "invalid_feature"),
    "no base64": ("***", "invalid_base64"),
    "nothing": ("", "empty_media"),
    "nested 100 000 times": (_encoded(b"\x91" * 100_000), "invalid_feature"),
    "pickle": (_item(pixel_values=["uint8", [4], _raw(b"cos\n", 1)]), "invalid_feature"),
    "cloudpickle": (_item(pixel_values=["uint8", [4], _raw(b"cos\n", 2)]), "invalid_feature"),
    "3 MB": ("A" * 3_000_000, "invalid_feature"),
    "a million numbers": (_item(pixel_values=[1] * 1_000_000), "invalid_feature"),
    "tensors in a million lists": (_item(pixel_values=[[]] * 1_000_000), "invalid_feature"),
    "a shape of 2^80": (_item(pixel_values=["uint8", [2**40, 2**40], _raw(b"")]), "invalid_feature"),
    "shared memory": (_item(pixel_values=["uint8", [4], {"name": "psm_0"}]), "invalid_feature"),
    "a buffer that is not there": (_item(pixel_values=["uint8", [4], 3]), "invalid_feature"),
    "another dtype": (_item(pixel_values=["float32", [8, 1176], _ROWS[2]], image_grid_thw=_GRID), "invalid_feature"),
    "no grid": (_item(pixel_values=_ROWS), "invalid_feature"),
    "a grid of others": (
        _item(pixel_values=_ROWS, image_grid_thw=["int64", [3], _raw(bytes(24))]),
        "invalid_feature",
    ),
}

_PARTS = {
    "forbidden URL": ([{"type": "image_url", "url": "http://127.0.0.1/"}], 400, "media_url_forbidden"),
    "too many pixels": ([{"type": "image_url", "url": _PIXELS}], 413, "image_too_large"),
    "no object": ([5, None], 400, 400),
    "of our own scheme": ([{"type": "image_url", "url": "medialane:0"}], 400, "invalid_media_url"),
    "17 of them": ([{"type": "image_url", "url": "http://{host}/good.jpg"}] * 17, 400, "too_many_media_items"),
}

_OTHER = "medialane:feature/" + "a" * 64

_NAMED = {
    "hash alone": (None, 404, "unknown_media"),
    "unknown reference": (_OTHER, 404, "unknown_media"),
    "reference without a hash": ("medialane:feature/", 404, "unknown_media"),
    "reference to a path": ("medialane:feature/../../etc/passwd", 404, "unknown_media"),
    "reference of a megabyte": ("medialane:feature/" + "a" * 1_000_000, 404, "unknown_media"),
    "reference of intake": ("medialane:AAAAAAAAAAAA:0", 400, "invalid_request"),
    "number": (5, 400, "invalid_request"),
    "list": ([_OTHER], 400, "invalid_request"),
}


def _several(number: int) -> Body:
    """Features of many items."""
    features = {
        "mm_hashes": {"image": ["a" * 64] * number},
        "mm_placeholders": {"image": [_PLACE] * number},
        "kwargs_data": None,
    }
    return posted(token_ids=[6] * 8, sampling_params={"max_tokens": 3}, features=features)


_SHAPES = {
    "empty": {},
    "list": [1],
    "hashes that are a list": {"mm_hashes": ["a"], "mm_placeholders": {}},
    "other modality": {"mm_hashes": {"smell": ["a"]}, "mm_placeholders": {"smell": [_PLACE]}},
    "fewer data than hashes": {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [_PLACE] * 2},
        "kwargs_data": {"image": ["x"]},
    },
    "data of another modality": {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [_PLACE]},
        "kwargs_data": {"video": ["x"]},
    },
}

GENERATE_ROWS = (
    *(Row(f"+ {name}", _generated(data), 400, code, path=GENERATE) for name, (data, code) in _TENSORS.items()),
    *(Row(f"+ {name}", _generated(data), status, code, path=GENERATE) for name, (data, status, code) in _NAMED.items()),
    *(
        Row(
            f"+ features: {name}",
            posted(token_ids=[1] * 8, sampling_params={"max_tokens": 3}, features=features),
            400,
            "invalid_request",
            path=GENERATE,
        )
        for name, features in _SHAPES.items()
    ),
    Row(
        "+ tensors of more tokens",
        _generated(_item(pixel_values=_ROWS, image_grid_thw=_GRID), {"offset": 0, "length": 3}),
        400,
        "invalid_request",
        path=GENERATE,
    ),
    Row("+ 17 features", _several(17), 400, "too_many_media_items", path=GENERATE),
    Row("+ 50 000 features", _several(50_000), 400, "invalid_body", path=GENERATE),
    Row("+ placeholder before the prompt", _generated(_OTHER, {"offset": -1, "length": 4}), 400, 400, path=GENERATE),
    Row("+ placeholder of no token", _generated(_OTHER, {"offset": 0, "length": 0}), 400, 400, path=GENERATE),
    Row("+ huge placeholder", _generated(_OTHER, {"offset": 0, "length": 2**62}), 400, 400, path=GENERATE),
    *(
        Row(
            f"+ part: {name}",
            posted(token_ids=[6] * 8, sampling_params={"max_tokens": 3}, content_parts=parts),
            status,
            code,
            path=GENERATE,
        )
        for name, (parts, status, code) in _PARTS.items()
    ),
)
