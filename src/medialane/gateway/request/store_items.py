"""Finds media items at the store of this host."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple, cast

import msgspec
import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from medialane.arena import ENTRY_HEADER_BYTES, describe, layout
from medialane.gateway.admission import MustWait
from medialane.gateway.request.assembly import ImageBudget
from medialane.media import MediaConfig, image_size, oriented_size
from medialane.observability.logging import request_id
from medialane.observability.timeline import RequestTimeline
from medialane.prepare.processor import Described, ProcessedItem
from medialane.runtime.tasks import LoopFairness
from medialane.store.client import StoreLink
from medialane.store.holds import HoldCache, StoreHold
from medialane.store.messages import (
    AliasResolved,
    CachedFound,
    DescribeItem,
    DocumentOpened,
    FindCached,
    FindItem,
    Form,
    ImagePublished,
    ImageSize,
    ItemDescribed,
    ItemFound,
    OpenDocument,
    PublishImage,
    PutFeature,
    Question,
    Reply,
    ResolveAlias,
    SendData,
    StoreCall,
)
from medialane.types.errors import (
    InvalidRequest,
    MediaLost,
    MediaTooLarge,
    ProtocolViolation,
    StoreUnavailable,
    Unavailable,
)
from medialane.types.feature import Feature, Hold, StagedItem
from medialane.types.hashing import content_hash, feature_key, merged_options, tensors_key
from medialane.types.media import MAX_DOCUMENTS_BYTES, DocumentOptions, MediaRef, MediaSize, OpenedDocument, naming
from medialane.types.stats import PoolStats
from medialane.types.tensor import ArenaRange, TensorSpec

#: RIFF header, `fmt ` and `fact` chunks (the latter is required for floats), header of the `data` chunk.
_HEADER = struct.Struct("<4sI4s 4sIHHIIHHH 4sII 4sI")

_FLOAT = 3

_SAMPLE_BYTES = 4


def wave_size(num_samples: int) -> int:
    """Return the size of the file in bytes."""
    return _HEADER.size + _SAMPLE_BYTES * num_samples


def wave_bytes(samples: NDArray[np.float32], sample_rate: int) -> bytes:
    """Return the file. Equal samples give equal bytes (libsndfile adds the time)."""
    num_bytes = samples.nbytes
    header = _HEADER.pack(
        *(b"RIFF", _HEADER.size - 8 + num_bytes, b"WAVE"),
        *(b"fmt ", 18, _FLOAT, 1, sample_rate, sample_rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES, 0),
        *(b"fact", 4, samples.size),
        *(b"data", num_bytes),
    )
    return b"".join((header, np.ascontiguousarray(samples, "<f4").data))


#: Bytes copied per iteration of the event loop, about 100 us.
_PIECE_BYTES = 512 * 1024


class _Wanted(NamedTuple):
    """`encoder` is the digest of the encoder whose embedding is preferred; empty if none is."""

    form: Form
    options: bytes = b"{}"
    encoder: str = ""
    refers: bool = False


#: Content hash, modality, whether it is embeddings or a feature, decode options, item options, tenant, owner; what is
#: wanted of it. The store keeps for each client what it has.
_Key = tuple[str, str, bool, bool, bytes, bytes, str, str, _Wanted]


class StoreItems:
    """Finds or makes media items. The caller owns every hold that is returned.

    All raise MedialaneError with the request field of the reference: StoreUnavailable if the store is not connected.
    Bytes that came with a request are hashed here, and written straight into the arena if the store does not have
    them.
    """

    def __init__(
        self,
        link: StoreLink,
        *,
        processor_digest: str,
        fairness: LoopFairness,
        media: MediaConfig,
        retention_s: float = 0.0,
    ) -> None:
        self._link = link
        self._media = media
        self._digest = processor_digest
        self._fairness = fairness
        self._holds: HoldCache[_Key, ItemFound] = HoldCache(link, retention_s=retention_s)
        #: Documents that came with requests, by content, salt and options.
        self._documents: LRUCache[object, OpenedDocument] = LRUCache(
            MAX_DOCUMENTS_BYTES, getsizeof=attrgetter("nbytes")
        )

    async def resolve(self, ref: MediaRef) -> MediaRef:
        """Return `ref`, with the content and options of its alias if it has nothing else. Raises UnknownMediaUuid."""
        if not ref.is_alias:
            return ref
        reply = await self._link.call(lambda call_id: ResolveAlias(call_id, ref))
        return cast("AliasResolved", reply).ref

    @property
    def preparers(self) -> PoolStats | None:
        """The preparers as the store reported them last; None while it is not connected."""
        status = self._link.status
        return None if status is None else status.stats.preparers

    @property
    def arena(self) -> str | None:
        """The id of the arena in which items are found; None if the store is not connected."""
        return self._link.arena

    def key(self, ref: MediaRef, options: bytes, *, content: str) -> str:
        """Return the feature key of `ref`, without preparing it. `content` is its content hash."""
        content, io = ref.identity(content)
        return feature_key(
            processor=self._digest,
            content=content,
            io=io,
            options=merged_options(options, ref.options),
            salt=ref.salt,
        )

    async def count_sent(self, ref: MediaRef, budget: ImageBudget) -> None:
        """Count an image that came with the request, or a page, in `budget`."""
        data, page = ref.data, ref.page
        if (data is None and page is None) or ref.modality != "image" or ref.is_embeds or budget.has_counted(ref):
            return
        size = None if page is None else (page.width, page.height)
        if data is not None and page is None:
            async with self._fairness.step(len(data)):
                with suppress(InvalidRequest):  # decoding it will say why
                    size = image_size(data, self._media)
        if size is not None:
            with naming(ref):
                await budget.add(ref, *size)

    async def processed(
        self, ref: MediaRef, options: bytes, timeline: RequestTimeline, budget: ImageBudget, *, encoder: str = ""
    ) -> StagedItem:
        """Return the feature of `ref`, processed with the options of the request and of `ref`. If the arena has its
        embedding by the `encoder` with this digest, it has that instead of tensors.

        An image of a URL that is not cached is counted in `budget` before it is decoded.
        """
        self._check_fits(ref, budget.num_bytes(ref, "processed"))
        hold = await self._find(ref, _Wanted("processed", options, encoder), timeline, budget)
        return _staged(ref, hold, hold.value.feature)

    async def hold_cached(
        self, refs: Sequence[MediaRef], form: Form, options: bytes, *, encoder: str
    ) -> list[StoreHold[_Key, ItemFound]]:
        """Return holds on items whose content is known and that are cached, by one message: finding them needs no other
        while these are held. `form` is what a stage sends."""
        if form == "encoded":  # only of pages there is an image file: other bytes may have to be checked
            form, refs = "file", [ref for ref in refs if ref.page is not None]
        wanted = _Wanted(form, options, encoder) if form == "processed" else _Wanted(form)
        keys = {_key(ref, ref.content, wanted): ref for ref in refs if not ref.is_feature}
        missing = {key: ref for key, ref in keys.items() if key is not None and key not in self._holds}
        if len(missing) < 2:  # finding it also makes it
            return []
        asked = [msgspec.structs.replace(ref, data=None) for ref in missing.values()]
        reply = await self._link.call(lambda call_id: FindCached(call_id, asked, form, options, encoder))
        found = zip(missing, cast("CachedFound", reply).items, strict=True)
        return [self._holds.add(key, item.hold_id, item.range, item) for key, item in found if item is not None]

    async def open_document(self, ref: MediaRef, options: DocumentOptions) -> OpenedDocument:
        """Return a document with the pages that are wanted: the reference to each is `ref` with the document's content
        hash and the page's `io`. Nothing is rendered. The store is asked once for bytes that a client sends with each
        turn of a chat; always for a URL, whose content may have changed. Raises as `media.open_document`, and what
        finding the bytes raises."""
        timeline = RequestTimeline()
        asked, num_bytes = await self._hashed(ref, timeline)
        key = asked.content, asked.salt, options
        if (known := self._documents.get(key)) is not None:
            return known

        def ask(call_id: int) -> OpenDocument:
            return OpenDocument(call_id, asked, options, num_bytes, request_id=request_id.get())

        async def answer(question: Question) -> None:
            if not isinstance(question, SendData):
                raise ProtocolViolation(f"unexpected {type(question).__name__}")
            await self._write(ref.data or b"", timeline, question.range)

        opened = cast("DocumentOpened", await self._link.call(ask, answer)).document
        if asked.content is not None:  # the content of a URL may change
            with suppress(ValueError):  # too large to be kept
                self._documents[key] = opened
        return opened

    async def described(
        self, ref: MediaRef, options: bytes, timeline: RequestTimeline, budget: ImageBudget
    ) -> StagedItem | None:
        """Return the feature of `ref` without tensors, which is known from the size of its media: nothing is processed.
        None if its header also depends on its content.

        `budget` is as in `processed`.
        """
        asked, num_bytes, size = await self._looked_at(ref, timeline, budget)
        options = merged_options(options, ref.options)

        def ask(call_id: int) -> DescribeItem:
            return DescribeItem(call_id, asked, options, num_bytes, size, request_id=request_id.get())

        reply = cast("ItemDescribed", await self._ask(ref, ask, timeline, budget, "encoded"))
        if (described := reply.described) is None:
            return None
        key = self.key(ref, options, content=reply.content_hash)
        feature = Feature(ref.modality, key, described.header, (), described.size)
        return StagedItem(ref, feature, content_hash=reply.content_hash)

    async def _looked_at(
        self, ref: MediaRef, timeline: RequestTimeline, budget: ImageBudget
    ) -> tuple[MediaRef, int | None, MediaSize | None]:
        """As `_hashed`, and, in the same step, count an image and return its size as decoded, if its header makes that
        certain."""
        data = ref.data
        if (page := ref.page) is not None:
            await self.count_sent(ref, budget)
            return *await self._hashed(ref, timeline), MediaSize(width=page.width, height=page.height)
        if data is None or ref.modality != "image" or ref.is_embeds:
            return *await self._hashed(ref, timeline), None

        def look() -> tuple[str, MediaSize | None]:
            content = content_hash(data)
            try:
                return content, oriented_size(data, self._media)
            except InvalidRequest:  # measuring it will say why
                return content, None

        with timeline.measure("fetch"):
            content, size = await self._fairness.run(len(data), look)
        if size is None:
            await self.count_sent(ref, budget)
        else:
            with naming(ref):
                await budget.add(ref, size.width, size.height)
        return msgspec.structs.replace(ref, data=None, content=content), len(data), size

    def tensors(self, feature: Feature) -> list[memoryview]:
        """Return the bytes of the feature's large tensors, in the arena: valid while the caller holds them."""
        try:
            return [self._link.tensor(tensor) for tensor in feature.tensors]
        except MediaLost as error:
            raise self._link.unavailable(error.message) from error

    def forget(self, hold: Hold | None) -> None:
        """Look up the item of `hold` again for the next request: it may be found in another form."""
        if hold is not None:
            cast("StoreHold[_Key, ItemFound]", hold).forget()

    async def decoded(
        self, ref: MediaRef, options: bytes, timeline: RequestTimeline, budget: ImageBudget
    ) -> StagedItem:
        """Return the decoder's output for `ref`, under the key of its feature. `budget` is as in `processed`."""
        self._check_fits(ref, budget.num_bytes(ref, "decoded"))
        hold = await self._find(ref, _Wanted("decoded"), timeline, budget)
        item = _staged(ref, hold, hold.value.feature)
        key = self.key(ref, options, content=hold.value.content_hash)
        return dataclasses.replace(item, feature=msgspec.structs.replace(item.feature, mm_hash=key))

    async def encoded(
        self, ref: MediaRef, options: bytes, timeline: RequestTimeline, budget: ImageBudget
    ) -> StagedItem:
        """Return the current encoded bytes of `ref`, under the key of its feature: nothing has to be computed. If their
        header must be checked, a preparer has opened them. Of a page, an image file of its pixels.

        An image of a URL is counted in `budget`.
        """
        hold = await self._find(ref, _Wanted("encoded" if ref.page is None else "file"), timeline, budget)
        content = hold.value.content_hash
        if (file := hold.value.feature) is not None:
            feature = msgspec.structs.replace(file, mm_hash=self.key(ref, options, content=content), size=MediaSize())
            return StagedItem(ref, feature, hold, media_type="image/png", content_hash=content)
        if (encoded := hold.value.encoded) is None:
            raise _in_another_form(hold)
        tensors = describe(encoded.range, (TensorSpec("uint8", (encoded.num_bytes,)),))
        feature = Feature(ref.modality, self.key(ref, options, content=content), b"", tensors, MediaSize())
        return StagedItem(ref, feature, hold, media_type=encoded.media_type, content_hash=content)

    async def refer(self, ref: MediaRef, options: bytes, timeline: RequestTimeline, budget: ImageBudget) -> None:
        """Let the client of `ref` name the feature of the item, which is made when that is used."""
        hold = await self._find(ref, _Wanted("encoded", options, refers=True), timeline, budget)
        hold.forget()
        hold.release()

    async def put(self, ref: MediaRef, item: ProcessedItem, timeline: RequestTimeline) -> StagedItem:
        """Return the feature of tensors that a client has sent, which are written to the arena unless it has them. Its
        key is the tensors': it is the content hash of the result and of its reference."""
        num_bytes = sum(spec.nbytes for spec in item.specs)
        self._check_fits(ref, num_bytes)
        content = await self._fairness.run(
            num_bytes,
            lambda: tensors_key(
                processor=self._digest, modality=ref.modality, header=item.header, tensors=item.buffers, salt=ref.salt
            ),
        )
        named = msgspec.structs.replace(ref, data=None, content=content)
        key = _key(named, content, _Wanted("processed"))
        if key is not None and (hold := self._holds.use(key)) is not None:
            return _staged(named, hold, hold.value.feature)

        async def answer(question: Question) -> None:
            if isinstance(question, SendData):
                offsets = [offset - ENTRY_HEADER_BYTES for offset in layout(item.specs)[0]]
                for offset, data in zip(offsets, item.buffers, strict=True):
                    await self._write(data, timeline, question.range, at=offset)

        described = Described(item.header, item.size)
        of = request_id.get()
        reply = await self._link.call(lambda call_id: PutFeature(call_id, named, described, item.specs, of), answer)
        found = cast("ItemFound", reply)
        hold = self._holds.add(key, found.hold_id, found.range, found)
        return _staged(named, hold, found.feature)

    def unavailable(self, message: str) -> StoreUnavailable:
        """Return the error of a request whose media were lost with the store."""
        return self._link.unavailable(message)

    def samples(self, feature: Feature) -> NDArray[np.float32]:
        """Return the samples of decoded audio, in the arena: valid while the caller holds them."""
        (data,) = self.tensors(feature)
        return np.frombuffer(data, np.float32)

    async def wave(self, samples: NDArray[np.float32], sample_rate: int) -> bytes:
        """Return a copy of the samples as a file (`wave_bytes`)."""
        return await self._fairness.run(samples.nbytes, lambda: wave_bytes(samples, sample_rate))

    async def publish(self, entry: ArenaRange) -> bytes:
        """Publish a decoded image, which the caller holds, for an RDMA read by another process; return its
        `media.data_url.PublishedImage` as JSON. Raises MediaUrlForbidden unless the operator allows it."""
        reply = await self._link.call(lambda call_id: PublishImage(call_id, entry), arena=entry.arena)
        return cast("ImagePublished", reply).image

    async def _find(
        self, ref: MediaRef, wanted: _Wanted, timeline: RequestTimeline, budget: ImageBudget
    ) -> StoreHold[_Key, ItemFound]:
        asked, num_bytes = await self._hashed(ref, timeline)
        key = _key(ref, asked.content, wanted)
        if key is not None and (hold := self._holds.use(key)) is not None:
            timeline.num_hits += wanted.form != "encoded"
            return hold
        form, options, encoder, refers = wanted

        def find(call_id: int) -> FindItem:
            of = request_id.get()
            return FindItem(call_id, asked, form, options, num_bytes, encoder=encoder, refers=refers, request_id=of)

        item = cast("ItemFound", await self._ask(ref, find, timeline, budget, form))
        timeline.merge(item.timeline)
        return self._holds.add(key, item.hold_id, item.range, item)

    async def _hashed(self, ref: MediaRef, timeline: RequestTimeline) -> tuple[MediaRef, int | None]:
        """Return `ref` with the content hash of its data instead of them, and their size."""
        if (data := ref.data) is None:
            return ref, None
        if ref.content is not None:  # of the pages of a document that was opened
            return msgspec.structs.replace(ref, data=None), len(data)
        with timeline.measure("fetch"):
            content = await self._fairness.run(len(data), lambda: content_hash(data))
        return msgspec.structs.replace(ref, data=None, content=content), len(data)

    async def _ask(  # noqa: PLR0917 - the same as of `_find`
        self,
        ref: MediaRef,
        call: Callable[[int], StoreCall],
        timeline: RequestTimeline,
        budget: ImageBudget,
        form: Form,
    ) -> Reply:
        """Make a call about `ref`: write its data where the store wants them, and count it."""
        if ref.url is None:
            timeline.enter("prepare")

        async def answer(question: Question) -> None:
            timeline.enter("prepare")
            if isinstance(question, SendData):
                budget.missing()
                await self._write(ref.data or b"", timeline, question.range)
                return
            if not isinstance(question, ImageSize):
                raise ProtocolViolation(f"unexpected {type(question).__name__}")
            with naming(ref):
                await budget.add(ref, question.width, question.height)
            budget.missing()
            self._check_fits(ref, budget.num_bytes(ref, form))

        try:
            return await self._link.call(call, answer)
        except MustWait:
            await budget.wait()
            return await self._link.call(call, answer)
        except Unavailable:
            self._documents.clear()  # a store of another release renders other pixels: they are opened anew
            raise

    def _check_fits(self, ref: MediaRef, num_bytes: int) -> None:
        """Raise MediaTooLarge if an image's size implies that it can never be stored once it is prepared."""
        if num_bytes > self._link.max_payload_bytes:
            message = f"the item takes {num_bytes} bytes once prepared, more than this server can store"
            raise MediaTooLarge(message, param=ref.param)

    async def _write(
        self, data: bytes | memoryview, timeline: RequestTimeline, entry: ArenaRange, *, at: int = 0
    ) -> None:
        """Copy `data` to offset `at` of the payload of `entry`, in pieces on the event loop, where cancellation takes
        effect between two pieces: a thread could still be writing to a range that has been reallocated."""
        async with self._fairness.step(len(data)):
            source = memoryview(data).cast("B")
            for start in range(0, len(data), _PIECE_BYTES):
                await asyncio.sleep(0)
                piece = source[start : start + _PIECE_BYTES]
                start += at
                self._link.payload(entry)[start : start + len(piece)] = piece  # raises if the store is lost
        timeline.copied_bytes += len(data)


def _key(ref: MediaRef, content: str | None, wanted: _Wanted) -> _Key | None:
    """Return what identifies an item in one form. None if the store must be asked: a URL's content may have changed,
    and an alias that came with data is bound there."""
    binds_alias = ref.alias is not None and ref.data is not None
    if content is None or (ref.url is not None and ref.page is None) or binds_alias:
        return None
    return content, ref.modality, ref.is_embeds, ref.is_feature, ref.io, ref.options, ref.salt, ref.owner, wanted


def _staged(ref: MediaRef, hold: StoreHold[_Key, ItemFound], feature: Feature | None) -> StagedItem:
    if feature is None:
        raise _in_another_form(hold)
    is_hit = hold.is_shared or hold.value.is_hit
    return StagedItem(ref, feature, hold, is_hit=is_hit, content_hash=hold.value.content_hash)


def _in_another_form(hold: StoreHold[_Key, ItemFound]) -> ProtocolViolation:
    hold.release()
    return ProtocolViolation("the store has found an item in another form")
