"""What a request will cost, in milliseconds of each kind of work."""

from __future__ import annotations

import msgspec


class Cost(msgspec.Struct, frozen=True):
    """The expected work of one request, ms: preparing its media, encoding them, and prefilling its prompt, of each what
    no cache has. Not `is_certain` while too few measured requests agree with the model: then it may rank requests, but
    must refuse none."""

    prepare_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    is_certain: bool = False

    @property
    def engine_ms(self) -> float:
        return self.encode_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.prepare_ms + self.encode_ms + self.prefill_ms
