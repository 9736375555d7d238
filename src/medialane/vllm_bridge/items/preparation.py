"""The heavy half of vLLM's multimodal processor (`RequestProcessor` makes of it what a preparer needs).

Theory of operation. vLLM's `BaseMultiModalProcessor.apply` has a heavy and a light step: the Hugging Face processor
over pixels, and the expansion of placeholders in the prompt (`assembler.py`). The heavy step does not depend on the
prompt, so a preparer runs it for a single item. Private methods of vLLM 0.32
are called by `seams.multimodal`; `tests/contract/test_preparation.py` pins them.

It also samples the same frames of a video as vLLM (implements `types.media.FrameSampler`).

Theory of operation. Each family has its own sampler in vLLM, a loader class that computes frame numbers from the
decoder's metadata of the file, has them read, and describes them in its own metadata. The loader that vLLM would choose
does all of that here too, with one step replaced: the decode function, which loaders look up at each call, is replaced
for the duration of the call by one over our `Video`; loaders that read OpenCV's capture themselves (GLM-5) keep vLLM's.
A preparer has one thread, so no other code sees the replacement; `tests/contract/test_video_exactness.py` pins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
import numpy as np
import torch
from PIL import Image as PILImage
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import ProcessedItem
from medialane.types.errors import FeatureUnsupported, InvalidRequest, InvalidVideo, PreparationFailed
from medialane.types.media import MODALITIES, AudioSamples, Decoded, FrameBatch, Image, MediaSize, Video
from medialane.vllm_bridge.engine_errors import engine_fault
from medialane.vllm_bridge.items.header_values import MALFORMED_FEATURE, NO_OPTIONS, HeaderWriter, decode_options
from medialane.vllm_bridge.items.options import model_io
from medialane.vllm_bridge.seams.multimodal import (
    OpenCVError,
    decodes_on_gpu,
    fields_config,
    load_frames,
    run_hf_processor,
    video_backend,
)

#: Sizes of the images with which the two input formats of the model's processor are compared.
_COMPARED_SIZES = ((64, 64), (56, 168), (301, 211))

#: Raised for an item of a trial that a model's processor refuses, or cannot handle: a library or a file may be missing.
PREPARATION_ERRORS = (InvalidRequest, PreparationFailed, *MALFORMED_FEATURE, ImportError, OSError)

#: An image side of up to this many pixels could be mistaken for the channel dimension.
_MAX_CHANNELS = 4


class VllmProcessor:
    """The heavy half: one decoded item to tensors."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._headers = HeaderWriter(processor)

    def process(self, media: Decoded, options: bytes, *, as_tensor: bool = False) -> ProcessedItem:
        """Process one item separately. `as_tensor`: an image is passed to Hugging Face's processor as a tensor over our
        pixels, not as a Pillow image, which torch-based ones copy three times to get the same tensor."""
        try:
            return self._apply(media, options, as_tensor=as_tensor)
        except (ValueError, TypeError) as error:
            raise _failure(error, media) from error
        except MALFORMED_FEATURE as error:
            if options == NO_OPTIONS:
                raise
            raise _failure(error, media) from error  # the processor rejected the options

    def accepts_tensors(self) -> bool:
        """Return whether the results are equal for images passed as tensors. Processes some images."""
        return all(self._is_same_for_tensors(*size) for size in _COMPARED_SIZES)

    def _is_same_for_tensors(self, width: int, height: int) -> bool:
        noise = Image(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        try:
            one, other = (self.process(noise, NO_OPTIONS, as_tensor=as_tensor) for as_tensor in (False, True))
        except PREPARATION_ERRORS:  # a processor that uses Pillow's methods, or refuses such a size
            return False
        return (one.header, one.specs, one.buffers) == (other.header, other.specs, other.buffers)

    def _apply(self, media: Decoded, options: bytes, *, as_tensor: bool) -> ProcessedItem:
        kwargs = decode_options(options)
        modality = media.modality
        items = self._processor.info.parse_mm_data({modality: [engine_media(media, as_tensor=as_tensor)]})
        with torch.inference_mode():
            data = run_hf_processor(self._processor, items, kwargs)
        try:
            processed = MultiModalKwargsItems.from_hf_inputs(data, fields_config(self._processor, data, kwargs))
        except MALFORMED_FEATURE as error:
            if options != NO_OPTIONS:
                raise
            raise FeatureUnsupported(f"the fields of one {modality} cannot be separated") from error
        if list(processed) != [modality] or len(processed[modality]) != 1:
            counts = {name: len(made) for name, made in processed.items()}
            raise FeatureUnsupported(f"the model's processor makes items {counts} of one {modality}")
        return self._headers.encode(modality, processed[modality][0], _processed_size(media, items), options)


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
    if not isinstance(media, Image):
        assert_never(media)
    if as_tensor and min(media.pixels.shape[:2]) > _MAX_CHANNELS:
        return torch.from_numpy(media.pixels).permute(2, 0, 1)
    return PILImage.fromarray(media.pixels)


def _processed_size(media: Decoded, items: Any) -> MediaSize:
    """Return the size that prompt assembly uses; for audio, the number of samples after vLLM's resampling."""
    if isinstance(media, AudioSamples):
        return MediaSize(num_samples=items["audio"].get_audio_length(0))
    return media.size


#: Raised by samplers for unsupported videos and numbers.
_REFUSALS = (ValueError, AssertionError, ArithmeticError, LookupError, TypeError, NotImplementedError, OpenCVError)

_JPEG_LIST_START = b"/9j/"


class VllmFrameSampler:
    """Samples like vLLM does for `model_config`. Not thread-safe.

    Options are not validated here: `options` restricts the clients'. `max_sampled_frames` limits the frames
    requested of vLLM's own decoder; a `Video` has its own limit.
    """

    def __init__(self, model_config: Any, *, max_sampled_frames: int = 768) -> None:
        given = model_io(model_config)
        self._own: dict[str, Any] = dict(given.get("video") or {})
        self._image: dict[str, Any] = dict(given.get("image") or {})
        self._backend = video_backend(model_config)
        self._max_sampled_frames = max_sampled_frames

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        """See `FrameSampler.sample`. Raises InvalidRequest, InvalidVideo, and what `Video.read` raises."""
        requested = msgspec.json.decode(io, type=dict[str, Any])
        options = VideoMediaIO.merge_kwargs(self._own, requested)
        loader = options.get("video_backend", self._backend or "")
        if options.get("backend", "opencv") != "opencv" or decodes_on_gpu(loader):
            raise InvalidRequest("only vLLM's video backend opencv is supported")
        media_io = video_io(options, backend=self._backend, image=self._image)
        try:
            frames, metadata = self._load(video, media_io)
        except _REFUSALS as error:
            if (fault := engine_fault(error)) is not None:
                raise fault from error
            raise InvalidVideo("the model's sampler does not support this video with these options") from error
        if not len(frames):
            raise InvalidVideo("no frame of the video can be decoded")
        return FrameBatch(np.ascontiguousarray(frames), _encode_metadata(metadata))

    def _load(self, video: Video, media_io: Any) -> tuple[Any, dict[str, Any]]:
        if bytes(video.data[:4]) == _JPEG_LIST_START:
            frames, metadata = media_io.load_base64("video/jpeg", str(video.data, "ascii")).media
        else:
            frames, metadata = load_frames(media_io, video, self._max_sampled_frames)
        return frames, metadata


def video_io(options: Mapping[str, Any], *, backend: str | None, image: Mapping[str, Any]) -> VideoMediaIO:
    """Return vLLM's video reader with these options, made as in `MediaConnector.fetch_video`: `backend` is the model's
    loader, unless the options name one, `image` are the operator's options of images, for the frames of video/jpeg."""
    own = {"video_backend": backend} if backend else {}
    return VideoMediaIO(ImageMediaIO(**{"image_mode": "RGB", **image}), **{**own, **options})


def _encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata for the processor as JSON, without the encoded video, which Nemotron's loader adds."""
    kept = {key: value for key, value in metadata.items() if key != "original_video_bytes"}
    return msgspec.json.encode(kept, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a sampler's metadata has a {type(value).__name__}")
