"""vLLM's hashes of media items (`mm_hash`), computed by vLLM over stand-ins for what it would have decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image as PILImage
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import MultiModalDataItems, ProcessorBatchItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.processor import BaseMultiModalProcessor


def mm_hashes(
    processor: BaseMultiModalProcessor,
    items: Mapping[str, Sequence[Any]],
    uuids: Mapping[str, Sequence[str | None]],
    *,
    options: Mapping[str, object],
    io: Mapping[str, Mapping[str, object]],
) -> Mapping[str, list[str]]:
    """Return the hashes of all items of a prompt, by modality; of those with a uuid, the item is not read."""
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=MultiModalDataItems({name: ProcessorBatchItems(each, name) for name, each in items.items()}),
        mm_uuid_items=dict(uuids),
        hf_processor_mm_kwargs=options,
        media_io_kwargs=io,
    )
    hashes: Mapping[str, list[str]] = processor._get_mm_hashes(inputs)
    return hashes


def encoded_image(data: bytes | memoryview, *, io_config: Mapping[str, object] | None) -> Any:
    """Return an image of vLLM's loader, whose pixels are not hashed. Nor is its EXIF: an ImageID counts only if it is a
    Python UUID, which no file has."""
    return MediaWithBytes(PILImage.new("RGB", (1, 1)), data, io_config)


def encoded_video(data: bytes | memoryview, shape: tuple[int, ...], metadata: Mapping[str, object]) -> Any:
    """Return a video of vLLM's loader with frames of this shape, which vLLM hashes only if they have fewer bytes than
    the file."""
    return MediaWithBytes(np.broadcast_to(np.uint8(0), shape), data), metadata


def decoded_video(data: bytes | memoryview, frames: Any, metadata: Mapping[str, object]) -> Any:
    return MediaWithBytes(frames, data), metadata
