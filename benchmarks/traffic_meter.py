"""Measures what gateways receive from workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from medialane.wire import HEADER, decode_from_worker


@dataclass
class TrafficMeter:
    """What the gateways have received, together: messages and bytes by kind, and the CPU time that they spent on it
    (`received_s`) and on each decision (`decisions_s`)."""

    num_messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    received_s: float = 0.0
    decisions_s: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.num_messages.clear()
        self.num_bytes.clear()
        self.received_s = 0.0

    def receiving(self, receive: Callable[[Any], object]) -> Callable[[Any], None]:
        """Return `receive` with the decoding that a connection does, measured."""

        def measured(message: msgspec.Struct) -> None:
            encoded, kind = memoryview(msgspec.msgpack.encode(message)), type(message).__name__
            self.num_messages[kind] += 1
            self.num_bytes[kind] += HEADER.size + len(encoded)
            self.applying(lambda _: receive(decode_from_worker(encoded)))(message)

        return measured

    def applying(self, apply: Callable[[Any], object]) -> Callable[[Any], None]:
        """Return `apply`, measured."""

        def measured(message: object) -> None:
            started = time.thread_time()
            apply(message)
            self.received_s += time.thread_time() - started

        return measured
