"""The hashes of plain vLLM (implements `core.media_hash.MediaHasher`).

Theory of operation. vLLM hashes an item as its loader has returned it, with the request's options for media and
processor. What of it is hashed depends on the modality (`vllm/multimodal/hasher.py`): of an image the encoded bytes,
and the decode settings if its pixels were converted; of a video the encoded bytes and the sampler's metadata, or the
frames if these are smaller; of audio the samples, resampled to the model's rate; of images in vision chunks the pixels.
So vLLM's own function runs over stand-ins: an image without pixels, frames that have a shape and no memory. Only where
it reads pixels or samples must the item be decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec
from PIL import Image as PILImage
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import InvalidRequest
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import DecodedItem, EncodedItem, HashedItem
from medialane.types.media import AudioSamples, FrameBatch, MediaRef
from medialane.vllm_bridge.engine_errors import engine_fault
from medialane.vllm_bridge.seams.multimodal import decoded_video, encoded_image, encoded_video, mm_hashes, video_backend
from medialane.vllm_bridge.seams.vision_chunk import name_for_engine, takes_chunks

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
    """Hashes as the engines of `processor`'s model do."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._takes_chunks = takes_chunks(processor)
        self._adds_video = video_backend(processor.info.ctx.model_config) in _WITH_VIDEO

    def has_name(self, ref: MediaRef) -> bool:
        return ref.alias is not None

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
            return encoded_video(item.data, _shape(item), self._metadata(item.size.metadata, item))
        return encoded_image(item.data, io_config=None if item.is_rgb else _CONVERTED)

    def _decoded(self, item: DecodedItem) -> Any:
        media = item.media
        if isinstance(media, AudioSamples):
            parsed = self._processor.info.parse_mm_data({"audio": [(media.samples, media.sample_rate)]})
            return parsed["audio"].get_item_for_hash(0)
        if isinstance(media, FrameBatch):
            return decoded_video(item.data, media.frames, self._metadata(media.metadata, item))
        return {"type": "image", "image": PILImage.fromarray(media.pixels), "uuid": None}

    def _metadata(self, metadata: bytes, item: EncodedItem | DecodedItem) -> _Mapping:
        decoded = msgspec.json.decode(metadata, type=_Mapping)
        return {**decoded, "original_video_bytes": item.data} if self._adds_video else decoded


def _shape(item: EncodedItem) -> tuple[int, ...]:
    size = item.size
    return size.num_frames, size.height, size.width, 3
