"""Processed items that clients send, name and are sent.

*Generate.* vLLM's generate endpoint over prompts with processed items, which the gateway finds or stores. vLLM's
handler decodes the tensors of a request on the event loop, and trusts ranges, hashes and tensors. Here intake has put
references in their place (`gateway.intake.sent_features`), so the handler gets the input of an engine that was made of
them: features that the client names, or of its tensors, which have a key of ours. The ranges that clients send do
not say which of their tokens are replaced by embeddings; that is restored from the model's placeholders, with which the
prompt's tokens are compared.

*Files.* GET /medialane/v1/features/{mm_hash} serves the tensors of features, as the engine is given them. The format of
safetensors is a JSON header and the bytes of all tensors, so a file is sent in pieces from the arena, without a copy as
a whole; the other format is vLLM's own (`mm_serde`, not in base64). A tensor of a field that is a list of them has the
field's name and its place there, `field.0`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from medialane.runtime.tasks import LoopFairness, gather_or_cancel
from medialane.types.errors import InvalidRequest, UnknownMedia
from medialane.types.feature import Feature, PlaceholderRange, PreparedPrompt, StagedItem
from medialane.types.media import MediaRef, Modality, naming
from medialane.types.media_lease import SALT_HEADER, salt_of
from medialane.types.tensor import ITEM_BYTES
from medialane.vllm_bridge.frontend.render import cut
from medialane.vllm_bridge.frontend.renderer_hook import remembered_errors
from medialane.vllm_bridge.frontend.request_backend import RequestBackend
from medialane.vllm_bridge.items.features import decode_item, named_values
from medialane.vllm_bridge.items.prepared_input import engine_input
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.sent_tensors import SentTensors, TensorsReader
from medialane.vllm_bridge.seams.scale_out import Buffer, encoded_item, generate_by

T = TypeVar("T")


def serve_generate(state: Any, backend: RequestBackend, profile: ModelProfile | None, fairness: LoopFairness) -> None:
    """Serve the generate endpoint of an app with this state from `backend`."""
    reader = None if profile is None or profile.is_unfit else TensorsReader(profile)
    has_encoder_prompt = profile is not None and profile.processor.info.ctx.model_config.is_encoder_decoder
    generate_by(state, _Hook(backend, None if has_encoder_prompt else reader, fairness).engine_input)


class _Hook:
    def __init__(self, backend: RequestBackend, reader: TensorsReader | None, fairness: LoopFairness) -> None:
        self._backend = backend
        self._reader = reader
        self._fairness = fairness
        self._reading = asyncio.Lock()  # the reader's work is done in a thread, or here if it is small

    async def engine_input(self, request: Any) -> Any:
        """Return the engine's input of a request with features. Raises MedialaneError, which it has recorded."""
        with remembered_errors(self._backend):
            if self._reader is None:
                raise InvalidRequest("features of this model are not supported: send its media", param="features")
            given = list(_items(request.features, self._backend.resolve))
            found = await gather_or_cancel([self._found(ref, self._reader) for ref, _ in given])
            prepared = await self._backend.place(
                list(request.token_ids), [item for item, _ in found], [place for _, place in given]
            )
            _check_placed(prepared, found, self._reader)
            made = engine_input(prepared)
            if request.cache_salt is not None:
                made["cache_salt"] = request.cache_salt
            return made

    async def _found(self, ref: MediaRef, reader: TensorsReader) -> tuple[StagedItem, SentTensors | None]:
        """Return the item, and its tensors if they differ from a feature that this server has made."""
        if ref.data is None:
            return await self._backend.find_feature(ref), None
        data = ref.data
        sent = await self._read(ref, len(data), lambda: reader.read(ref.modality, data))
        if (known := await self._known(ref, sent, reader)) is not None:
            return known, None
        item = await self._read(ref, sent.nbytes, lambda: reader.check(sent))
        return await self._backend.put_feature(ref, item), sent

    async def _known(self, ref: MediaRef, sent: SentTensors, reader: TensorsReader) -> StagedItem | None:
        """Return the feature of the hash that the client gave with the tensors, if it is the same."""
        try:
            item = await self._backend.find_feature(ref, with_tensors=True)
        except UnknownMedia:
            return None
        tensors = self._backend.tensors(item.feature)
        is_same = await self._read(ref, sent.nbytes, lambda: reader.equals(sent, item.feature.header, tensors))
        return item if is_same else None

    async def _read(self, ref: MediaRef, num_bytes: int, work: Callable[[], T]) -> T:
        with naming(ref):
            async with self._reading:
                return await self._fairness.run(num_bytes, work)


def _items(features: Any, resolve: Callable[[str], MediaRef]) -> Iterator[tuple[MediaRef, PlaceholderRange]]:
    """Yield each item's reference and range. Raises InvalidRequest if a modality's ranges are not in order."""
    for name, entries in features.kwargs_data.items():
        end = 0
        for number, (entry, place) in enumerate(zip(entries, features.mm_placeholders[name], strict=True)):
            if place.offset < end:
                message = "the placeholders of a modality must be in the order of the prompt"
                raise InvalidRequest(message, param=f"features.mm_placeholders.{name}[{number}]")
            end = place.offset + place.length
            yield resolve(entry), PlaceholderRange(place.offset, place.length)


def _check_placed(
    prepared: PreparedPrompt, found: Sequence[tuple[StagedItem, SentTensors | None]], reader: TensorsReader
) -> None:
    """Raise InvalidFeature unless tensors that only the client has made fit their placeholders."""
    for placed, (item, sent) in zip(prepared.features, found, strict=True):
        if sent is not None:
            with naming(item.ref):
                reader.check_placed(sent, placed.placeholder)


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


def serve_files(app: Any, backend: RequestBackend, fairness: LoopFairness, making: Making) -> None:
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
            parts = (
                safetensors_of(found, tensors, texts)
                if form == "safetensors"
                else encoded_item(decode_item(found.header, tensors))
            )
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
    # Tensors are aligned, as the library's own.
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


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
