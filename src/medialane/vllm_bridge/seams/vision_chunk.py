"""Models that take images as vLLM's modality `vision_chunk` (Kimi-K2.5 and K2.6).

For these, vLLM's chat parser makes one `vision_chunk` of each image, a mapping with the image in it. Everything of ours
(decoders, hashes, limits, routing) knows images. So a processor of such a model is changed to take and return images,
and the engine gets vLLM's name back. Videos are refused: vLLM splits them by a method that none of its processors has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image as PILImage
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, ProcessorBatchItems, VisionChunkProcessorItems
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

_CHUNK = "vision_chunk"
_IMAGE = "image"

#: Pixels; vLLM's own profiling uses 3000, or a chunk of a video.
_DUMMY_SIDE = 3000


def takes_chunks(processor: BaseMultiModalProcessor) -> bool:
    """Return whether vLLM's own name for this model's images is `vision_chunk`."""
    return set(processor.info.get_supported_mm_limits()) == {_CHUNK}


def take_images(processor: BaseMultiModalProcessor) -> BaseMultiModalProcessor:
    """Return the processor, which takes images from now on if it took only vision chunks. Idempotent."""
    info = processor.info
    if takes_chunks(processor) and _CHUNK in info.supported_mm_limits:
        # Cached properties, which are thereby computed for vLLM's own modality.
        info.allowed_mm_limits = {_IMAGE: info.allowed_mm_limits[_CHUNK]}
        info.supported_mm_limits = {_IMAGE: info.supported_mm_limits[_CHUNK]}
        _parse_images(info.data_parser)
        _return_images(processor)
        _make_dummy_images(processor.dummy_inputs)
    return processor


def name_for_engine(by_modality: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of images by the name that the engine of such a model has for them."""
    return {_CHUNK: by_modality[_IMAGE]}


@dataclass(frozen=True)
class ChunkSource:
    """What a media connector returns for an image of such a model: the chat parser puts `media` into a chunk."""

    media: Any


def chunk_sources(modality: str, items: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Return modality and items of the chat parser; for chunks, the items that it made them from."""
    return (_IMAGE, [chunk[_IMAGE] for chunk in items]) if modality == _CHUNK else (modality, items)


class _Chunks(ProcessorBatchItems[Any]):  # type: ignore[misc]  # vllm is not typed
    """Images, which the processor gets as chunks."""

    def __init__(self, images: Sequence[Any]) -> None:
        super().__init__([{"type": _IMAGE, _IMAGE: _pillow_image(image), "uuid": None} for image in images], _IMAGE)

    def get_processor_data(self) -> Mapping[str, object]:
        return {f"{_CHUNK}s": self.get_all()}


class _SizeOnly(PILImage.Image):
    """An image of a given size without pixels: the number of its tokens depends on nothing else."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.known_size = (width, height)

    @property
    def size(self) -> tuple[int, int]:
        return self.known_size

    @property
    def mode(self) -> str:
        return "RGB"


def _pillow_image(image: Any) -> Any:
    """Return an image in the only form that these processors accept."""
    if not isinstance(image, np.ndarray):
        return image
    return PILImage.fromarray(image) if any(image.strides) else _SizeOnly(image.shape[1], image.shape[0])


def _parse_images(parser: Any) -> None:
    parse = parser._parse_image_data

    def as_chunks(data: Any) -> _Chunks:
        if parser.is_embeddings(data):
            raise ValueError("embeddings of a vision_chunk are not supported")  # as vLLM's own parser
        return _Chunks(parse(data).get_all())

    parser._get_subparsers = lambda: {_IMAGE: as_chunks}


def _return_images(processor: Any) -> None:
    own_fields, own_updates = processor._get_mm_fields_config, processor._get_prompt_updates

    def fields(hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Mapping[str, Any]:
        configs = own_fields(hf_inputs, hf_processor_mm_kwargs)
        return {name: MultiModalFieldConfig(config.field, _IMAGE) for name, config in configs.items()}

    def updates(mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any) -> Sequence[Any]:
        chunks = {_CHUNK: VisionChunkProcessorItems(mm_items[_IMAGE].get_all())} if mm_items else {}
        processed = MultiModalKwargsItems({_CHUNK: out_mm_kwargs.get(_IMAGE, [])})
        own = own_updates(MultiModalDataItems(chunks), hf_processor_mm_kwargs, processed)
        return [replace(update, modality=_IMAGE) for update in own]

    processor._get_mm_fields_config, processor._get_prompt_updates = fields, updates


def _make_dummy_images(dummy_inputs: Any) -> None:
    own_text = dummy_inputs.get_dummy_text

    def text(mm_counts: Mapping[str, int]) -> str:
        return str(own_text({_CHUNK: mm_counts.get(_IMAGE, 0)}))

    def data(seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]) -> Any:
        images = dummy_inputs._get_dummy_images(
            width=_DUMMY_SIDE,
            height=_DUMMY_SIDE,
            num_images=mm_counts.get(_IMAGE, 0),
            overrides=mm_options.get(_IMAGE),
        )
        return {_IMAGE: images}

    dummy_inputs.get_dummy_text, dummy_inputs.get_dummy_mm_data = text, data
