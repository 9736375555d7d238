"""Serves the tensors of features, as the engine is given them: GET /medialane/v1/features/{mm_hash}.

The format of safetensors is a JSON header and the bytes of all tensors, so a file is sent in pieces from the arena,
without a copy as a whole; the other format is vLLM's own (`mm_serde`, not in base64). A tensor of a field that is a
list of them has the field's name and its place there, `field.0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from medialane.runtime.tasks import LoopFairness
from medialane.types.errors import InvalidRequest
from medialane.types.feature import Feature
from medialane.types.media import Modality
from medialane.types.media_lease import SALT_HEADER, salt_of
from medialane.types.tensor import ITEM_BYTES
from medialane.vllm_bridge.frontend.render import cut
from medialane.vllm_bridge.frontend.renderer_hook import remembered_errors
from medialane.vllm_bridge.frontend.request_backend import RequestBackend
from medialane.vllm_bridge.items.features import decode_item, named_values
from medialane.vllm_bridge.seams.scale_out import Buffer, encoded_item

PATH: Final = "/medialane/v1/features/{mm_hash}"

#: The same as the metadata of the safetensors format, for both formats, as JSON.
FEATURE_HEADER = b"x-medialane-feature"

_MEDIA_TYPES = {"safetensors": b"application/octet-stream", "msgpack": b"application/vnd.msgpack"}

#: Names of dtypes in the format of safetensors.
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip

#: How the values of each modality are made.
Making = Mapping[Modality, Mapping[str, object]]


def install(app: Any, backend: RequestBackend, fairness: LoopFairness, making: Making) -> None:
    async def feature(request: Request) -> Response:
        """The tensors of a media item, as the engine is given them"""
        with remembered_errors(backend):
            query, mm_hash = request.query_params, request.path_params["mm_hash"]
            form = query.get("format", "safetensors")
            if form not in _MEDIA_TYPES:
                raise InvalidRequest(f"format must be one of {', '.join(_MEDIA_TYPES)}", param="format")
            found = await backend.named_feature(mm_hash, salt_of(request.headers.raw))
            tensors = backend.tensors(found)
            metadata = {"mm_hash": found.mm_hash, "modality": found.modality, **making[found.modality]}
            metadata |= named_values(found.header, tensors)[1]
            texts = {name: value if isinstance(value, str) else _json(value) for name, value in metadata.items()}
            parts = safetensors_of(found, tensors, texts) if form == "safetensors" else _msgpack(found, tensors)
            headers = {"content-type": _MEDIA_TYPES[form], FEATURE_HEADER.decode(): _json(texts).encode()}
            return _Pieces(parts, headers, fairness, backend)

    parameters = [
        {"name": "format", "in": "query", "schema": {"enum": list(_MEDIA_TYPES), "default": "safetensors"}},
        {"name": SALT_HEADER.decode(), "in": "header", "schema": {"type": "string", "default": ""}},
    ]
    app.add_api_route(
        PATH,
        feature,
        methods=["GET"],
        tags=["medialane"],
        summary=feature.__doc__,
        response_class=Response,
        responses={404: {"description": "The feature is unknown, or another client's"}},
        openapi_extra={"parameters": parameters},
    )


class _Pieces(Response):
    """Sends buffers, a piece in each iteration of the event loop, to a client that reads them in time."""

    def __init__(
        self, parts: Sequence[Buffer], headers: Mapping[str, bytes], fairness: LoopFairness, backend: RequestBackend
    ) -> None:
        self._backend = backend
        self._parts = parts
        self._num_bytes = sum(map(len, parts))
        self._fairness = fairness
        self.status_code, self.background = 200, None
        self.raw_headers = [(name.encode(), value) for name, value in headers.items()]
        self.raw_headers.append((b"content-length", b"%d" % self._num_bytes))

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with self._backend.sending(self._num_bytes):
            for piece in cut(self._parts):
                async with self._fairness.step(len(piece)):
                    body = bytes(piece)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def safetensors_of(feature: Feature, tensors: Sequence[memoryview], metadata: Mapping[str, str]) -> list[Buffer]:
    """Return a file with all tensors of a feature, large ones without a copy. Raises InvalidRequest."""
    header: dict[str, object] = {"__metadata__": metadata}
    values = named_values(feature.header, tensors)[0]
    # Tensors are aligned, as those that the library writes.
    in_order = sorted(values.items(), key=lambda one: (-ITEM_BYTES[one[1][0].dtype], one[0]))
    at = 0
    for name, (spec, data) in in_order:
        if spec.dtype not in _DTYPES:
            raise InvalidRequest(f"safetensors has no dtype {spec.dtype}: use format=msgpack", param="format")
        header[name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": (at, at + len(data))}
        at += len(data)
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(data for _, (_, data) in in_order)]


def _msgpack(feature: Feature, tensors: Sequence[memoryview]) -> list[Buffer]:
    return encoded_item(decode_item(feature.header, tensors))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
