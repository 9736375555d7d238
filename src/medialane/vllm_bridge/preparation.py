"""The heavy half of vLLM's multimodal processor (fills `prepare.Processor`).

Theory of operation. vLLM's `BaseMultiModalProcessor.apply` does a heavy thing and a light thing: the Hugging Face
processor over pixels, and the expansion of placeholders in the prompt (`assembler.py`). The heavy half does not depend
on the prompt, so a preparer runs it for one item alone. It uses private methods of vLLM 0.32;
`tests/contract/test_preparation.py` pins them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image as PILImage
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import (
    InvalidAudio,
    InvalidImage,
    InvalidRequest,
    InvalidVideo,
    UnsupportedMediaType,
)
from medialane.core.hashing import canonical_options
from medialane.core.media import AudioSamples, Decoded, FrameBatch, Image, MediaSize, Modality, Video
from medialane.media.model_choices import FrameSampler
from medialane.prepare.processor import NoProcessor, ProcessedItem, Processor
from medialane.vllm_bridge.arguments import create_model_config, parse_vllm_args
from medialane.vllm_bridge.assembler import supports_split
from medialane.vllm_bridge.features import encode_item
from medialane.vllm_bridge.frame_sampler import VllmFrameSampler
from medialane.vllm_bridge.image_tokens import ImageTokens
from medialane.vllm_bridge.model_files import model_files, use_no_network
from medialane.vllm_bridge.placeholder_layout import decode_options
from medialane.vllm_bridge.resize_target import ResizeTargets, Size
from medialane.vllm_bridge.seams.multimodal import fields_config, run_hf_processor


class FactoryConfig(msgspec.Struct, frozen=True):
    """What the fork server needs to build a processor."""

    model: str
    vllm_args: list[str]
    max_sampled_frames: int = 768


def build_processor(config: bytes) -> Processor:
    """Build and warm the processor of a fork server from a JSON `FactoryConfig`. Leaves one thread."""
    wanted = msgspec.json.decode(config, type=FactoryConfig)
    torch.set_num_threads(1)
    model_config = create_model_config(parse_vllm_args(wanted.model, wanted.vllm_args))
    if not model_config.supports_multimodal_inputs:
        return NoProcessor()
    engine_processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    takes_video = "video" in engine_processor.info.supported_mm_limits
    sampler = VllmFrameSampler(model_config, max_sampled_frames=wanted.max_sampled_frames)
    processor = VllmProcessor(
        engine_processor, sampler if takes_video else None, max_model_len=model_config.max_model_len
    )
    if supports_split(engine_processor):
        processor.warm_up()
    use_no_network()  # preparers have none
    return processor


#: Sizes of the images on which `warm_up` compares two ways of giving pixels to the model's processor.
_TRIAL_SIZES = ((64, 64), (56, 168), (301, 211))

#: Sizes of the images whose tokens are counted: some that processors enlarge, shrink, and cut into several tiles.
_TOKEN_TRIAL_SIZES = ((64, 64), (56, 168), (301, 211), (1200, 500))

#: A picture with a side of up to so many pixels could be taken for one with its channels there.
_MOST_CHANNELS = 4

#: What processors raise for media and options that they do not take (an image's aspect ratio over 200).
_REFUSALS: dict[Modality, type[InvalidRequest]] = {"image": InvalidImage, "video": InvalidVideo, "audio": InvalidAudio}


class VllmProcessor:
    """The heavy half: one decoded item to tensors.

    vLLM gives Hugging Face's processor a Pillow image, which torch-based ones copy three times before they have a
    tensor. After `warm_up` such a processor gets a tensor over our pixels instead, with the very strides that it would
    have made, if its results are the same for some pictures; every other one gets Pillow images.

    `sampler` chooses the frames of videos; without one there are none to process.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        sampler: FrameSampler | None = None,
        *,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self._processor = processor
        self._tokens = ImageTokens(processor, max_model_len)
        self._sampler = sampler
        self._takes_tensors = False

    @property
    def files(self) -> Sequence[str]:
        """vLLM loads the processor again, from the model's files, for options that it has not seen before."""
        return model_files(self._processor.info.ctx.model_config)

    @cached_property
    def _targets(self) -> ResizeTargets:
        return ResizeTargets.of(self._processor, self.process)

    def warm_up(self) -> None:
        """Run some media, so that forked children inherit imported modules and filled caches."""
        modalities = self._processor.info.get_supported_mm_limits()
        if "image" in modalities:
            self._takes_tensors = all(self._is_same_for_tensors(*size) for size in _TRIAL_SIZES)
            self._tokens.verify(self.process(trial_image(*size), b"{}") for size in _TOKEN_TRIAL_SIZES)
        if "video" in modalities:
            self.process(trial_video(), b"{}")
        if "audio" in modalities:
            self.process(trial_audio(), b"{}")

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        if self._sampler is None:
            raise UnsupportedMediaType("this model does not support video")
        return self._sampler.sample(video, io)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        return self._process(media, options, as_tensor=self._takes_tensors)

    def check_size(self, size: Size, options: bytes) -> None:
        self._tokens.check(size, options)

    def smaller_size(self, size: Size, smaller: Sequence[Size], options: bytes) -> Size | None:
        return self._targets.smaller_size(size, smaller, options)

    def has_resize_target(self) -> bool:
        """Whether the size that a photograph is resized to can be told, with the model's own options."""
        takes_images = "image" in self._processor.info.get_supported_mm_limits()
        return takes_images and self._targets.target((1024, 768), b"{}") is not None

    def _is_same_for_tensors(self, width: int, height: int) -> bool:
        noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        wanted = self._process(Image(noise), b"{}", as_tensor=False)
        try:
            found = self._process(Image(noise), b"{}", as_tensor=True)
        except (AttributeError, InvalidImage, LookupError, RuntimeError):  # a processor that wants Pillow's methods
            return False
        return (wanted.header, wanted.specs, wanted.buffers) == (found.header, found.specs, found.buffers)

    def _process(self, media: Decoded, options: bytes, *, as_tensor: bool) -> ProcessedItem:
        kwargs = decode_options(options)
        try:
            return self._apply(media, kwargs, as_tensor=as_tensor)
        except (ValueError, TypeError) as error:
            raise _refusal(media) from error
        except (LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
            if not kwargs:
                raise
            raise _refusal(media) from error  # a processor's way of refusing options

    def _apply(self, media: Decoded, kwargs: dict[str, object], *, as_tensor: bool) -> ProcessedItem:
        modality = modality_of(media)
        items = self._processor.info.parse_mm_data({modality: [engine_media(media, as_tensor=as_tensor)]})
        with torch.inference_mode():
            data = run_hf_processor(self._processor, items, kwargs)
        fields = fields_config(self._processor, data, kwargs)
        (item,) = MultiModalKwargsItems.from_hf_inputs(data, fields)[modality]
        header, specs, buffers = encode_item(item)
        return ProcessedItem(header=header, specs=specs, buffers=buffers, size=_processed_size(media, items))


def _refusal(media: Decoded) -> InvalidRequest:
    modality = modality_of(media)
    return _REFUSALS[modality](f"the model's processor refused this {modality} or its options")


def modality_of(media: Decoded) -> Modality:
    if isinstance(media, Image):
        return "image"
    return "video" if isinstance(media, FrameBatch) else "audio"


def engine_media(media: Decoded, *, as_tensor: bool = False) -> Any:
    """The item as vLLM's own loaders give it."""
    if isinstance(media, AudioSamples):
        return media.samples, media.sample_rate
    if isinstance(media, FrameBatch):
        return media.frames, msgspec.json.decode(media.metadata)
    if as_tensor and min(media.pixels.shape[:2]) > _MOST_CHANNELS:
        return torch.from_numpy(media.pixels).permute(2, 0, 1)
    return PILImage.fromarray(media.pixels)


def _processed_size(media: Decoded, items: Any) -> MediaSize:
    """The size that prompt assembly goes by: sound counts after vLLM has resampled it."""
    if isinstance(media, AudioSamples):
        return MediaSize(num_samples=items["audio"].get_audio_length(0))
    return media.size


def trial_image(width: int, height: int) -> Image:
    return Image(np.full((height, width, 3), 127, np.uint8))


def trial_video(width: int = 64, height: int = 64, num_frames: int = 4) -> FrameBatch:
    """A short clip, of which all frames were taken."""
    metadata = {
        "total_num_frames": num_frames,
        "fps": 2.0,
        "duration": num_frames / 2,
        "video_backend": "opencv",
        "frames_indices": list(range(num_frames)),
        "do_sample_frames": False,
    }
    return FrameBatch(np.full((num_frames, height, width, 3), 127, np.uint8), canonical_options(metadata))


def trial_audio(seconds: float = 1.0) -> AudioSamples:
    """A tone of 440 Hz at 16 kHz, which is the rate of most models."""
    times = np.arange(int(seconds * 16000), dtype=np.float32) / np.float32(16000)
    return AudioSamples(np.sin(np.float32(2 * np.pi * 440) * times), 16000)
