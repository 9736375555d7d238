"""The items that a model is tried with at start: samples of each modality, which its own processor has processed.

Theory of operation. What is known of a family is learned from such items, not from a list of names. Processing takes
most of the time of these trials, so each process does it once, without options, and keeps what is needed of an item:
its header and the shapes of its large tensors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.hashing import canonical_options
from medialane.types.media import AudioSamples, Decoded, FrameBatch, Image, MediaSize, Modality
from medialane.types.tensor import TensorSpec
from medialane.vllm_bridge.items.header_values import NO_OPTIONS, PlaceholderLayouts
from medialane.vllm_bridge.items.preparation import PREPARATION_ERRORS, VllmProcessor
from medialane.vllm_bridge.seams.multimodal import accepted_modalities

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


#: The largest last: an image of many tiles, audio longer than the window of Whisper's encoder. One image has odd sides.
SAMPLES: Mapping[Modality, tuple[Decoded, ...]] = {
    "image": (trial_image(64, 64), trial_image(451, 211), trial_image(280, 700), trial_image(1600, 1200)),
    "video": (trial_video(), trial_video(224, 112, 2), trial_video(168, 252, 7)),
    "audio": (trial_audio(), trial_audio(0.4), trial_audio(2.3), trial_audio(31.0)),
}


class TrialItem(NamedTuple):
    """A sample that the model's processor accepts, and its item, without the bytes of large tensors."""

    modality: Modality
    media: Decoded
    header: bytes
    size: MediaSize
    specs: tuple[TensorSpec, ...]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore transformers' warnings about `max_pixels`, the operator's or a trial's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


class TrialItems:
    """The items of one processor. Processes them, which takes a fraction of a second."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self.layouts = PlaceholderLayouts(processor)
        #: Those samples that the processor accepts: others are longer or larger than it supports, or of a size that it
        #: cannot handle. Empty if it accepts none of a modality; then `refusals` has the last error.
        self.by_modality: dict[Modality, Sequence[TrialItem]] = {}
        self.refusals: dict[Modality, Exception] = {}
        heavy = VllmProcessor(processor)
        for modality in SAMPLES:
            if modality in accepted_modalities(processor):
                self.by_modality[modality] = [*self._accepted(heavy, modality)]

    @without_warnings()
    def _accepted(self, heavy: VllmProcessor, modality: Modality) -> Sequence[TrialItem]:
        accepted = []
        for sample in SAMPLES[modality]:
            made = attempt(heavy.process, sample, NO_OPTIONS)
            if isinstance(made, Exception):
                if not isinstance(made, PREPARATION_ERRORS):
                    logger.info("the model's processor fails with a sample of %s", modality, exc_info=made)
                self.refusals[modality] = made
            else:
                accepted.append(TrialItem(modality, sample, made.header, made.size, made.specs))
        return accepted


def attempt(call: Callable[..., T], *args: object) -> T | Exception:
    """Return the result of a trial, or what it has raised: a family's own code (`--trust-remote-code`) may raise
    anything, and what fails is served in another way. A process without memory does not start: MemoryError passes."""
    try:
        return call(*args)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above; the caller reports it
        return error
