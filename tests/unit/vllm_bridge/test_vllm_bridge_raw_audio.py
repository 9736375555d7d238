"""Audio in the prompts that models make of an upload."""

import numpy as np
import pytest

from medialane.types.errors import InvalidRequest
from medialane.vllm_bridge.frontend.renderer_hook import is_audio, sampled

SAMPLES = np.linspace(-1, 1, 100, dtype=np.float32)


@pytest.mark.parametrize(
    ("item", "is_clip"),
    [
        (SAMPLES, True),
        ((SAMPLES, 16000), True),
        ((SAMPLES, np.float64(16000)), True),
        ([SAMPLES, SAMPLES], False),
        ((SAMPLES, SAMPLES), False),
        ([(SAMPLES, 16000)], False),
        (None, False),
    ],
)
def test_clip_is_told_from_a_list_of_clips(item, is_clip):
    assert is_audio(item) is is_clip


def test_clip_without_a_rate_has_the_models():
    for item, rate in ((SAMPLES, 8000), ((SAMPLES, 16000.0), 16000), (SAMPLES.astype(np.float64), 8000)):
        samples, found = sampled(item, 8000)
        assert (samples.dtype, found) == (np.float32, rate)
        assert samples.tobytes() == SAMPLES.tobytes()


def test_stereo_is_refused():
    with pytest.raises(InvalidRequest):
        sampled(np.zeros((2, 100), np.float32), 16000)
