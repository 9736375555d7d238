"""The heavy half of vLLM's multimodal processor (implements `prepare.Processor`).

Theory of operation. vLLM's `BaseMultiModalProcessor.apply` has a heavy and a light step: the Hugging Face processor
over pixels, and the expansion of placeholders in the prompt (`assembler.py`). The heavy step does not depend on the
prompt, so a preparer runs it for a single item. It uses private methods of vLLM 0.32;
`tests/contract/test_preparation.py` pins them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from huggingface_hub import constants
from PIL import Image as PILImage
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import (
    FeatureUnsupported,
    InvalidRequest,
    PreparationFailed,
    UnsupportedMediaType,
)
from medialane.core.hashing import canonical_options
from medialane.core.media import AudioSamples, Decoded, FrameBatch, FrameSampler, Image, MediaSize, Video
from medialane.core.modalities import MODALITIES
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.engine_errors import engine_fault
from medialane.vllm_bridge.items.header_values import NO_OPTIONS, UNFIT, HeaderWriter
from medialane.vllm_bridge.items.placeholder_layout import decode_options
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, fields_config, run_hf_processor

#: Sizes of the images with which `warm_up` compares the two input formats of the model's processor.
_TRIAL_SIZES = ((64, 64), (56, 168), (301, 211))

#: Raised for an item of a trial that a model's processor refuses, or cannot handle: a library or a file may be missing.
REFUSED = (InvalidRequest, PreparationFailed, *UNFIT, ImportError, OSError)

#: An image side of up to this many pixels could be mistaken for the channel dimension.
_MAX_CHANNELS = 4


class VllmProcessor:
    """The heavy half: one decoded item to tensors.

    vLLM passes a Pillow image to Hugging Face's processor, which torch-based ones copy three times to get a tensor.
    After `warm_up` such a processor gets a tensor over our pixels instead, with the strides that it would have produced
    itself, if its results are equal for some images; all others get Pillow images.

    `sampler` chooses the frames of videos; None if the model does not support video.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        sampler: FrameSampler | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self._processor = processor
        self._sampler = sampler
        self._headers = HeaderWriter(processor)
        self._accepts_tensors = False

    @property
    def files(self) -> Sequence[str]:
        """Folders that preparers must be able to read: vLLM reloads the processor from them for new options."""
        config = self._processor.info.ctx.model_config
        named = (config.model, config.tokenizer, config.hf_config_path)
        local = [os.path.abspath(path) for path in named if path and os.path.exists(path)]
        return [*local, constants.HF_HUB_CACHE]  # the cache does not contain the token

    def warm_up(self, *, without: Collection[str] = ()) -> None:
        """Process some media, so that forked children inherit imported modules and warm caches; a model may refuse
        them. `without`: modalities of which no item is processed here."""
        modalities = accepted_modalities(self._processor).difference(without)
        if "image" in modalities:
            self._accepts_tensors = all(self._is_same_for_tensors(*size) for size in _TRIAL_SIZES)
        if "video" in modalities:
            with suppress(*REFUSED):
                self.process(trial_video(), NO_OPTIONS)
        if "audio" in modalities:
            with suppress(*REFUSED):
                self.process(trial_audio(), NO_OPTIONS)

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        if self._sampler is None:
            raise UnsupportedMediaType("this model does not support video")
        return self._sampler.sample(video, io)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        return self._process(media, options, as_tensor=self._accepts_tensors)

    def _is_same_for_tensors(self, width: int, height: int) -> bool:
        noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        try:
            expected = self._process(Image(noise), NO_OPTIONS, as_tensor=False)
            found = self._process(Image(noise), NO_OPTIONS, as_tensor=True)
        except REFUSED:  # a processor that uses Pillow's methods, or refuses such a size
            return False
        return (expected.header, expected.specs, expected.buffers) == (found.header, found.specs, found.buffers)

    def _process(self, media: Decoded, options: bytes, *, as_tensor: bool) -> ProcessedItem:
        try:
            return self._apply(media, options, as_tensor=as_tensor)
        except (ValueError, TypeError) as error:
            raise _failure(error, media) from error
        except UNFIT as error:
            if options == NO_OPTIONS:
                raise
            raise _failure(error, media) from error  # the processor rejected the options

    def _apply(self, media: Decoded, options: bytes, *, as_tensor: bool) -> ProcessedItem:
        kwargs = decode_options(options)
        modality = media.modality
        items = self._processor.info.parse_mm_data({modality: [engine_media(media, as_tensor=as_tensor)]})
        with torch.inference_mode():
            data = run_hf_processor(self._processor, items, kwargs)
        try:
            found = MultiModalKwargsItems.from_hf_inputs(data, fields_config(self._processor, data, kwargs))
        except UNFIT as error:
            if options != NO_OPTIONS:
                raise
            raise FeatureUnsupported(f"the fields of one {modality} cannot be separated") from error
        if list(found) != [modality] or len(found[modality]) != 1:
            counts = {name: len(made) for name, made in found.items()}
            raise FeatureUnsupported(f"the model's processor makes items {counts} of one {modality}")
        return self._headers.encode(modality, found[modality][0], _processed_size(media, items), options)


def _failure(error: Exception, media: Decoded) -> BaseException:
    """Return the error for media and options that a processor rejects (e.g. an image's aspect ratio over 200), unless
    it has failed for another reason."""
    if (fault := engine_fault(error)) is not None:
        return fault
    invalid = MODALITIES[media.modality].invalid
    return invalid(f"the model's processor rejected this {media.modality} or its options")


def engine_media(media: Decoded, *, as_tensor: bool = False) -> Any:
    """Return the item as vLLM's own loaders would."""
    if isinstance(media, AudioSamples):
        return media.samples, media.sample_rate
    if isinstance(media, FrameBatch):
        return media.frames, msgspec.json.decode(media.metadata)
    if as_tensor and min(media.pixels.shape[:2]) > _MAX_CHANNELS:
        return torch.from_numpy(media.pixels).permute(2, 0, 1)
    return PILImage.fromarray(media.pixels)


def _processed_size(media: Decoded, items: Any) -> MediaSize:
    """Return the size that prompt assembly uses; for audio, the number of samples after vLLM's resampling."""
    if isinstance(media, AudioSamples):
        return MediaSize(num_samples=items["audio"].get_audio_length(0))
    return media.size


def trial_image(width: int, height: int) -> Image:
    return Image(np.full((height, width, 3), 127, np.uint8))


def trial_video(width: int = 64, height: int = 64, num_frames: int = 4) -> FrameBatch:
    """Return a short clip of which all frames were sampled."""
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
    """Return a tone of 440 Hz at 16 kHz, the sample rate of most models."""
    times = np.arange(int(seconds * 16000), dtype=np.float32) / np.float32(16000)
    return AudioSamples(np.sin(np.float32(2 * np.pi * 440) * times), 16000)
