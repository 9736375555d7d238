"""Waiting between vLLM's processes on a machine without a GPU.

If a model runs in several processes (tensor or pipeline parallel), EngineCore exchanges every step with them through
shared memory. A reader waits in `SpinCondition`: it spins in `sched_yield` for a second after the last message, then
sleeps until the writer's notification. On two cores such spinners keep every other process off the CPU: with Linux 6.18
and one stream of 6000 tokens the gateway waited up to 5 s for a core, and gateways considered workers dead. Sleeping at
every poll lets the others run, but halves the tokens per second, since each step waits for timers.

So readers spin while a step is running, with an occasional short sleep that lets the kernel run waiting processes; and
they block on the notification soon after the last message, not after a second.

On GPU hosts, where cores are many and steps are short, vLLM's behaviour is unchanged. The seam is private to vLLM 0.32;
`tests/contract/test_vllm_cpu_waiting.py` pins it. A model in one process does not wait at all (`engine_cpu`).
"""

from __future__ import annotations

import os
import time

from vllm.platforms import current_platform

from medialane.vllm_bridge.seams.cpu import SpinCondition, wait_by

#: One of this number of polls is a sleep: 30-50 us of spinning, then about 55 us (default timer slack) for others.
LOOKS_PER_SLEEP = 32

#: After the last message. Steps of a generating model are closer together; an idle one has none.
SPIN_S = 0.01


class _Spinning(SpinCondition):  # type: ignore[misc]  # vllm is not typed
    """vLLM's SpinCondition with both constants above."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._num_polls = 0
        if self.is_reader:
            self.busy_loop_s = SPIN_S

    def wait(self, timeout_ms: int | None = None) -> None:
        self._num_polls += 1
        if time.monotonic() > self.last_read + self.busy_loop_s:
            super().wait(timeout_ms)
        elif self._num_polls % LOOKS_PER_SLEEP:
            os.sched_yield()
        else:
            time.sleep(0)


def install() -> None:
    """Install this wait for the readers of this process, if it computes on the CPU. Idempotent."""
    if current_platform.is_cpu():
        wait_by(_Spinning)
