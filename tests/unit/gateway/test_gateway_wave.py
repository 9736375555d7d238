"""Samples as a file: decoders return the same samples, and equal samples give equal bytes."""

from io import BytesIO

import numpy as np
import pytest
import soundfile

from decoded_media import decode_audio
from medialane.gateway import wave_bytes, wave_size
from medialane.media import MediaConfig


@pytest.mark.parametrize("num_samples", [1, 2, 4801])
def test_decoders_return_exactly_the_samples(num_samples):
    samples = np.random.default_rng(num_samples).standard_normal(num_samples).astype(np.float32) * 3
    data = wave_bytes(samples, 16000)
    assert len(data) == wave_size(num_samples)
    found, rate = soundfile.read(BytesIO(data), dtype="float32")
    assert (found.tobytes(), rate) == (samples.tobytes(), 16000)
    decoded = decode_audio(memoryview(data), MediaConfig())
    assert (decoded.samples.tobytes(), decoded.sample_rate) == (samples.tobytes(), 16000)


def test_file_depends_on_samples_and_rate_only():
    samples = np.arange(100, dtype=np.float32)
    assert wave_bytes(samples, 8000) == wave_bytes(np.arange(200, dtype=np.float32)[:100], 8000)
    assert wave_bytes(samples, 8000) == wave_bytes(np.repeat(samples, 2)[::2], 8000)
    assert wave_bytes(samples, 8000) != wave_bytes(samples, 16000)
