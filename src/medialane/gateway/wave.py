"""Mono samples as a WAV file of 32-bit floats: every decoder returns exactly the same samples."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

#: RIFF header, `fmt ` and `fact` chunks (the latter is required for floats), header of the `data` chunk.
_HEADER = struct.Struct("<4sI4s 4sIHHIIHHH 4sII 4sI")
_FLOAT = 3
_SAMPLE_BYTES = 4


def wave_size(num_samples: int) -> int:
    """Return the size of the file in bytes."""
    return _HEADER.size + _SAMPLE_BYTES * num_samples


def wave_bytes(samples: NDArray[np.float32], sample_rate: int) -> bytes:
    """Return the file. Equal samples give equal bytes (libsndfile adds the time)."""
    num_bytes = samples.nbytes
    header = _HEADER.pack(
        *(b"RIFF", _HEADER.size - 8 + num_bytes, b"WAVE"),
        *(b"fmt ", 18, _FLOAT, 1, sample_rate, sample_rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES, 0),
        *(b"fact", 4, samples.size),
        *(b"data", num_bytes),
    )
    return b"".join((header, np.ascontiguousarray(samples, "<f4").data))
