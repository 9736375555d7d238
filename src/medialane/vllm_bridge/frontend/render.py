"""vLLM's render endpoints over items that the gateway describes or prepares.

Theory of operation. vLLM's handlers render a request, put the items' tensors into the answer as base64 of msgpack, and
encode that as JSON, on the event loop: tens of megabytes for four images. Here the same handlers run, but

* *what the request wants* (`mm_payload`) is noted before it is rendered, so that the renderer hook has the gateway
  describe the items instead of preparing them, unless their tensors are wanted;
* *tensors* are represented by marks, random strings, in the answer that vLLM's handler builds. `RenderAnswer` replaces
  them in the body as it is sent, in pieces: base64 of the bytes in the arena, a piece at a time and fairly among the
  requests, so that nothing is copied as a whole and the event loop is never blocked;
* *the tokens of a long prompt* likewise;
* *references* are those by which the backend knows the features.

The hashes of plain vLLM, for routers that ask for them (`VllmMediaHasher`).

Theory of operation. vLLM hashes an item as its loader has returned it, with the request's options for media and
processor. What of it is hashed depends on the modality (`vllm/multimodal/hasher.py`): of an image the encoded bytes,
and the decode settings if its pixels were converted; of a video the encoded bytes and the sampler's metadata, or the
frames if these are smaller; of audio the samples, resampled to the model's rate; of images in vision chunks the pixels.
So vLLM's own function runs over stand-ins: an image without pixels, frames that have a shape and no memory. Only where
it reads pixels or samples must the item be decoded.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from math import prod
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pybase64
from PIL import Image as PILImage
from starlette.routing import Route
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.runtime.tasks import LoopFairness
from medialane.types.errors import FeatureUnsupported, InvalidRequest
from medialane.types.feature import MediaPrompt, PreparedPrompt
from medialane.types.hashing import DecodedItem, EncodedItem, HashedItem
from medialane.types.media import AudioSamples, FrameBatch, MediaRef
from medialane.vllm_bridge.engine_errors import engine_fault
from medialane.vllm_bridge.frontend.request_backend import RequestBackend
from medialane.vllm_bridge.items.features import decode_item
from medialane.vllm_bridge.items.prepared_input import PreparedItems
from medialane.vllm_bridge.seams.multimodal import encoded_image, hashed_video, mm_hashes, video_backend
from medialane.vllm_bridge.seams.scale_out import (
    RENDER,
    Buffer,
    accept_payloads,
    encoded_item,
    metadata_of,
    render_by,
)
from medialane.vllm_bridge.seams.vision_chunk import name_for_engine, takes_chunks

#: What an answer has of its media items. The first two are vLLM's.
Payload = Literal["tensors", "none", "references"]

#: Says whether the items of an answer were all predicted from the size of their media, or at least one was processed.
MEDIA_HEADER = b"x-medialane-media"

_DESCRIPTION: Final = (
    "What the render response's `features` carry for multimodal items. 'tensors' serializes the processed tensors into "
    "`kwargs_data` and `mm_metadata`. 'none' sets both to null: nothing is decoded or processed where the tokens "
    "follow from the size of the media. 'references' gives a `medialane:feature/HASH` for each item in `kwargs_data`, "
    "which `/inference/v1/generate` accepts instead of the tensors. The default is the server's "
    "(`--render-payload`). Only supported on the render endpoints. Ignored on regular generation endpoints."
)

#: Encoded in 0.2 ms; a multiple of 3, so that the base64 of pieces equals the whole's.
_PIECE_BYTES = 192 * 1024

#: Marks are numbers, so that one can stand for others: this many and more.
_FIRST_MARK = 10**30
#: Of the part's number, after the random digits.
_NUMBER_DIGITS = 8

#: A longer prompt is encoded apart from the rest of its answer, as is its items' data.
_MAX_TOKENS = 4096

#: What a mark stands for: JSON, or bytes that are sent as base64.
_Part = bytes | list[Buffer]

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def accept_references() -> None:
    """Have the render endpoints accept `mm_payload: "references"`. Call it before vLLM's routes are built."""
    accept_payloads(Payload, _DESCRIPTION)


def install(
    app: Any, backend: RequestBackend, *, default: Payload, fairness: LoopFairness, has_chunks: bool = False
) -> None:
    """Serve the render endpoints of an app from `backend`. `default` is the payload of requests that say none. With
    `has_chunks`, vLLM's own name for the model's images is `vision_chunk`."""
    render_by(app.state, _CURRENT.get)

    def answering(endpoint: Any) -> Any:
        """Return an ASGI app that sends the answers of `endpoint` by a `RenderAnswer`."""

        async def answer(scope: Any, receive: Any, send: Send) -> None:
            rendered = RenderAnswer(backend, fairness, send, default=default, has_chunks=has_chunks)
            token = _CURRENT.set(rendered)
            try:
                await endpoint(scope, receive, rendered.send)
            finally:
                _CURRENT.reset(token)

        return answer

    routes = app.router.routes
    rendering = [route for route in routes if isinstance(route, Route) and route.path.endswith(RENDER)]
    for route in rendering:
        route.app = answering(route.app)
    # The first ones: each before them costs a request a regular expression, twice, which is a tenth of a render's time.
    routes[:] = [*rendering, *(route for route in routes if route not in rendering)]


class RenderAnswer:
    """The answer to one request of a render endpoint. `payload` is what it has of the items."""

    def __init__(
        self,
        backend: RequestBackend,
        fairness: LoopFairness,
        send: Send,
        *,
        default: Payload = "none",
        has_chunks: bool = False,
    ) -> None:
        """For `default` and `has_chunks` see `install`."""
        self.payload = default
        self._has_chunks = has_chunks
        self._backend = backend
        self._fairness = fairness
        self._send = send
        self._is_predicted: list[bool] = []
        self._references: dict[str, str] = {}
        self._prefix = _FIRST_MARK + secrets.randbelow(_FIRST_MARK)
        self._parts: list[_Part] = []
        self._start: Message | None = None

    def choose(self, request: Any) -> Payload:
        """Return the payload of a request that is going to be rendered."""
        if "mm_payload" in request.model_fields_set:
            self.payload = request.mm_payload
        return self.payload

    async def prepare(self, prompt: Any) -> PreparedPrompt:
        """Return the prompt with its items as the payload needs them. Raises MedialaneError; FeatureUnsupported if only
        a worker can expand it."""
        if self.payload == "tensors":
            prepared = await self._backend.prepare(prompt, with_tensors=True)
        else:
            prepared = await self._backend.describe(prompt)
        if len(prepared.features) != len(prompt.items):
            raise FeatureUnsupported(
                "the prompts of this model can be expanded by its workers only: it is not rendered"
            )
        if self.payload == "references":
            references = await self._backend.refer(prepared)
            keys = [placed.feature.mm_hash for placed in prepared.features]
            self._references.update(zip(keys, references, strict=True))
        self._is_predicted.append(prepared.is_predicted)
        return prepared

    def fill(self, features: Any, engine_input: Mapping[str, Any], metadata: Callable[[str], Collection[str]]) -> None:
        """Add what the payload asks for to the features of a prompt. `metadata` returns the names of the fields of a
        modality that are metadata."""
        if self.payload != "none":
            self._fill(features, engine_input["mm_kwargs"], metadata)
        if self._has_chunks:
            for name, by_modality in features:
                setattr(features, name, None if by_modality is None else name_for_engine(by_modality))

    def _fill(self, features: Any, items: PreparedItems, metadata: Callable[[str], Collection[str]]) -> None:
        kwargs_data: dict[str, list[str]] = {}
        mm_metadata: dict[str, list[str | None]] = {}
        for placed in items.prepared.features:
            feature = placed.feature
            entries = kwargs_data.setdefault(feature.modality, [])
            if self.payload == "references":
                entries.append(self._references[feature.mm_hash])
                continue
            item = decode_item(feature.header, self._backend.tensors(feature))
            entries.append(self.mark(encoded_item(item)))
            small = metadata_of(item, metadata(feature.modality))
            mm_metadata.setdefault(feature.modality, []).append(self.mark(encoded_item(small)) if small else None)
        features.kwargs_data = kwargs_data
        features.mm_metadata = {name: entries for name, entries in mm_metadata.items() if any(entries)} or None

    def shorten(self, rendered: Any) -> None:
        """Put marks for the tokens of a long prompt, and for their offsets."""
        if len(rendered.token_ids) > _MAX_TOKENS:
            rendered.token_ids = [self._number(msgspec.json.encode(rendered.token_ids)[1:-1])]
        if len(rendered.token_offsets or ()) > _MAX_TOKENS:  # a pair remains: the mark and the last number
            pairs, _, last = msgspec.json.encode(rendered.token_offsets)[2:-2].rpartition(b",")
            rendered.token_offsets = [(self._number(pairs), int(last))]

    async def send(self, message: Message) -> None:
        """Send a message of the app, with data in place of their marks."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        else:
            await self._send_body(message.get("body", b""), more_body=message.get("more_body", False))

    async def _send_body(self, body: bytes, *, more_body: bool) -> None:
        first, *marked = body.split(b"%d" % self._prefix) if self._parts else [body]
        parts: list[_Part] = [first]
        for text in marked:
            parts += [self._parts[int(text[:_NUMBER_DIGITS])], text[_NUMBER_DIGITS:]]
        start, self._start = self._start, None
        num_bytes = sum(map(_sent_bytes, parts))
        if start is not None:
            await self._send(self._started(start, None if more_body else num_bytes))
        async with self._backend.sending(num_bytes):
            async for piece in self._joined(parts):
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": more_body})

    def _started(self, start: Message, length: int | None) -> Message:
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if self._is_predicted:
            headers.append((MEDIA_HEADER, b"predicted" if all(self._is_predicted) else b"prepared"))
        return {**start, "headers": headers}

    async def _joined(self, parts: Sequence[_Part]) -> AsyncGenerator[bytes, None]:
        """Yield the body, a piece in each step of the event loop."""
        text = b""
        for part in parts:
            if isinstance(part, bytes):
                text += part
                continue
            for raw in cut(part):
                async with self._fairness.step(len(raw)):
                    text += pybase64.b64encode(raw)
                if len(text) >= _PIECE_BYTES:
                    yield text
                    text = b""
        yield text

    def mark(self, data: list[Buffer]) -> str:
        """Return what the answer sends as these bytes in base64."""
        return str(self._number(data))

    def _number(self, part: _Part) -> int:
        self._parts.append(part)
        return self._prefix * 10**_NUMBER_DIGITS + len(self._parts) - 1


def current_answer() -> RenderAnswer | None:
    """Return the answer that the current request is rendered for; None if it is not rendered only."""
    return _CURRENT.get(None)


_CURRENT: ContextVar[RenderAnswer] = ContextVar("medialane_render_answer")


def _sent_bytes(part: _Part) -> int:
    return len(part) if isinstance(part, bytes) else -(-sum(map(len, part)) // 3) * 4


def cut(buffers: Sequence[Buffer]) -> Iterator[bytearray]:
    """Yield the bytes of all buffers in pieces of `_PIECE_BYTES`, the last one shorter."""
    piece = bytearray()
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + _PIECE_BYTES - len(piece)]
            piece += part
            start += len(part)
            if len(piece) == _PIECE_BYTES:
                yield piece
                piece = bytearray()
    if piece:
        yield piece


#: What vLLM's image loader hashes with the bytes of an image that it has converted; we have its defaults.
_CONVERTED = {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}

#: Loaders whose metadata have the encoded video as their last member, which we leave out (`frame_sampler`).
_WITH_VIDEO = ("nemotron_vl",)

_Mapping = dict[str, Any]


class HashFactors(msgspec.Struct, frozen=True):
    """`MediaPrompt.hash_factors`: what vLLM hashes with each item, in the order of the client's JSON."""

    options: Mapping[str, object] = {}
    io: Mapping[str, Mapping[str, object]] = {}


class VllmMediaHasher:
    """Implements `types.hashing.MediaHasher`: hashes as the engines of `processor`'s model do."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._takes_chunks = takes_chunks(processor)
        self._adds_video = video_backend(processor.info.ctx.model_config) in _WITH_VIDEO

    def needs_decoding(self, item: EncodedItem) -> bool:
        if item.ref.modality == "video":
            return prod(_shape(item)) < len(item.data)
        return item.ref.modality == "audio" or self._takes_chunks

    def hashes(self, prompt: MediaPrompt, items: Sequence[HashedItem]) -> list[str]:
        factors = msgspec.json.decode(prompt.hash_factors, type=HashFactors)
        by_modality: dict[str, list[Any]] = {}
        uuids: dict[str, list[str | None]] = {}
        for ref, item in zip(prompt.items, items, strict=True):
            by_modality.setdefault(ref.modality, []).append(self._item(item))
            uuids.setdefault(ref.modality, []).append(None if ref.alias is None else ref.alias.uuid)
        if self._takes_chunks:
            by_modality, uuids = name_for_engine(by_modality), name_for_engine(uuids)
        try:
            hashes = mm_hashes(self._processor, by_modality, uuids, options=factors.options, io=factors.io)
        except (ValueError, TypeError, LookupError) as error:
            if (fault := engine_fault(error)) is not None:
                raise fault from error
            raise InvalidRequest("the model's processor rejected the options", param="mm_processor_kwargs") from error
        of_each = {modality: iter(each) for modality, each in hashes.items()}
        engine_name = {"image": next(iter(of_each))} if self._takes_chunks else {}
        return [next(of_each[engine_name.get(ref.modality, ref.modality)]) for ref in prompt.items]

    def _item(self, item: HashedItem) -> Any:
        """Return the item as vLLM's parser would pass it to its hasher."""
        if isinstance(item, MediaRef):
            return None
        if isinstance(item, DecodedItem):
            return self._decoded(item)
        if item.ref.modality == "video":
            frames = np.broadcast_to(np.uint8(0), _shape(item))
            return hashed_video(item.data, frames, self._metadata(item.size.metadata, item))
        return encoded_image(item.data, io_config=None if item.is_rgb else _CONVERTED)

    def _decoded(self, item: DecodedItem) -> Any:
        media = item.media
        if isinstance(media, AudioSamples):
            parsed = self._processor.info.parse_mm_data({"audio": [(media.samples, media.sample_rate)]})
            return parsed["audio"].get_item_for_hash(0)
        if isinstance(media, FrameBatch):
            return hashed_video(item.data, media.frames, self._metadata(media.metadata, item))
        return {"type": "image", "image": PILImage.fromarray(media.pixels), "uuid": None}

    def _metadata(self, metadata: bytes, item: EncodedItem | DecodedItem) -> _Mapping:
        decoded = msgspec.json.decode(metadata, type=_Mapping)
        return {**decoded, "original_video_bytes": item.data} if self._adds_video else decoded


def _shape(item: EncodedItem) -> tuple[int, ...]:
    size = item.size
    return size.num_frames, size.height, size.width, 3
