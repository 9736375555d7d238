"""Audio as the models' own prompts of transcriptions contain it: samples, with or without their rate."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import InvalidRequest


def is_audio(item: object) -> bool:
    """Return whether this is one clip: an array, or an array and its sample rate."""
    return isinstance(item, np.ndarray) or (
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], np.ndarray) and np.isscalar(item[1])
    )


def sampled(item: Any, default_rate: int) -> tuple[NDArray[np.float32], int]:
    """Return the samples of a clip and their rate. Raises InvalidRequest unless it is mono."""
    samples, rate = item if isinstance(item, tuple) else (item, default_rate)
    if samples.ndim != 1:
        raise InvalidRequest("only mono audio is supported")
    return samples.astype(np.float32, copy=False), round(rate)


def expected_sample_rate(processor: BaseMultiModalProcessor) -> int:
    """Return the rate that the model expects, to which vLLM does not resample an array without a rate; 16 kHz if it
    takes no audio, or any rate."""
    resampler = processor.info.get_data_parser().audio_resampler
    return round(resampler.target_sr or 16_000)
