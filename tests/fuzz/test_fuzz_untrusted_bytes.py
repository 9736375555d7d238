"""Mutated inputs, for `--fuzz-seconds`: each is accepted or rejected in time, and nothing else happens.

A finding is written to `.fuzz/` and reported with the command that reproduces it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest
from decoding_process import decoding_process
from mutator import Mutator
from targets import DECODE_TARGETS, HEADER_S, HEADER_TARGETS, LARGE_BYTES, LOOP_TARGETS, Target

from medialane.types.errors import MedialaneError

#: The clock is `--fuzz-seconds`.
pytestmark = pytest.mark.timeout(0)

FINDINGS = Path(__file__).resolve().parents[2] / ".fuzz"
_DECODE_SHARE = 0.3 / len(DECODE_TARGETS)
_LOOP_SHARE = 0.2 / len(LOOP_TARGETS)
_HEADER_SHARE = 0.5 / len(HEADER_TARGETS)

#: Returns the fault found with an input, or None.
Check = Callable[[bytes], str | None]


def _inputs(target: Target, seconds: float, seed: int, only: Path | None) -> Iterator[bytes]:
    if only is not None:
        yield only.read_bytes()
        return
    mutator = Mutator(seed, target.samples, target.tokens)
    until = time.monotonic() + seconds
    for data in itertools.chain(target.samples, iter(mutator.next, None)):
        if time.monotonic() > until:
            return
        yield data


def _fuzz(target: Target, check: Check, inputs: Iterator[bytes]) -> None:
    num_inputs = 0
    for data in inputs:
        num_inputs += 1
        wrong = check(data)
        if wrong is not None:
            FINDINGS.mkdir(exist_ok=True)
            path = FINDINGS / f"{target.name}-{blake2b(data, digest_size=6).hexdigest()}"
            path.write_bytes(data)
            again = f"pytest tests/fuzz -k '[{target.name}]' --fuzz-input {path.relative_to(FINDINGS.parent)}"
            pytest.fail(f"{wrong}\ninput {num_inputs}: {data[:200]!r}\nagain: {again}", pytrace=False)
    assert num_inputs, "no input was tried"


def _checked(target: Target, most_s: float = HEADER_S) -> Check:
    def check(data: bytes) -> str | None:
        taken_s = min(_run(target, data) for _ in range(2)) if _run(target, data) > most_s else 0.0
        return f"it takes {taken_s:.3f} s" if taken_s > most_s else None

    def checked(data: bytes) -> str | None:
        try:
            return check(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            return repr(error)

    return checked


def _run(target: Target, data: bytes) -> float:
    """Seconds of CPU time, independent of other load on the machine."""
    started = time.thread_time()
    with suppress(MedialaneError):
        target.run(data)
    return time.thread_time() - started


@pytest.mark.parametrize("target", HEADER_TARGETS, ids=lambda target: target.name)
def test_any_bytes_are_accepted_or_rejected_in_time(
    target: Target, fuzz_seconds: float, fuzz_seed: int, fuzz_input: Path | None
):
    _fuzz(target, _checked(target), _inputs(target, fuzz_seconds * _HEADER_SHARE, fuzz_seed, fuzz_input))


def _grown(inputs: Iterator[bytes], seed: int) -> Iterator[bytes]:
    """Each input with a part of it repeated, to the size that a file may have."""
    choose = random.Random(seed)
    for data in inputs:
        start = choose.randrange(len(data) or 1)
        part = data[start : start + choose.choice((1, 2, 4, 8, 12, 64, 8192))] or b"\0"
        yield (data[: start + len(part)] + part * (LARGE_BYTES // len(part)) + data[start + len(part) :])[:LARGE_BYTES]


@pytest.mark.parametrize("target", LOOP_TARGETS, ids=lambda target: target.name)
def test_large_file_blocks_the_event_loop_for_milliseconds_only(
    target: Target, fuzz_seconds: float, fuzz_seed: int, fuzz_input: Path | None
):
    inputs = _inputs(target, fuzz_seconds * _LOOP_SHARE, fuzz_seed, fuzz_input)
    _fuzz(target, _checked(target, target.loop_s), inputs if fuzz_input else _grown(inputs, fuzz_seed))


@pytest.mark.parametrize("target", DECODE_TARGETS.values(), ids=lambda target: target.name)
def test_any_file_is_decoded_or_rejected_within_time_and_memory_limits(
    target: Target, fuzz_seconds: float, fuzz_seed: int, fuzz_input: Path | None
):
    with decoding_process(target.name) as process:
        _fuzz(target, process.run, _inputs(target, fuzz_seconds * _DECODE_SHARE, fuzz_seed, fuzz_input))
