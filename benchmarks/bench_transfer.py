"""`medialane bench transfer`: copies of entries between the stores of two hosts.

Each size is copied from one process's arena to another's: over loopback, and, as root, between two network namespaces
over veth. `raw` is sendfile and recv_into on one blocking connection between the same arenas, in the same run, the
modes alternating. `tcp` is what a worker's store does: check whether the entry is here, open it at its source with a
capability, reserve, receive, have the source confirm its hold, publish. `nixl` is the same with a NIXL read, of which
UCX makes messages over TCP here (UCX_TLS=tcp). CPU is that of all threads and the mover's process, per copy.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from harness import Bar, Options, Report, median, percentile
from medialane.config import process_environ
from namespaces import two_hosts
from transfer_ends import MODES, Copied, Source, Task, cpu_s

ABOUT = "copies of entries between the stores of two hosts, against a raw socket"

#: Bytes -> rounds: the features of a small picture, of a 1024x768 picture in bfloat16 and float32, a video's.
SIZES = {250_000: 200, 4_700_000: 80, 18_800_000: 30, 150_000_000: 8}
MIN_SHARE = 0.9
MAX_ADDED_MS = 1.0
#: Size from which the throughput counts.
LARGE = 4_700_000
#: Of a NIXL agent without transfers, in cores.
MAX_IDLE_CPU = 0.02
_IDLE_S = 5.0

#: For the answer of a process: all rounds of one size.
_ANSWER_TIMEOUT_S = 120.0

_PROGRAM = str(Path(__file__).with_name("transfer_ends.py"))

T = TypeVar("T")


def run(options: Options) -> Report:
    report = Report("transfer", tables={"copies": []})
    _measure(report, "loopback", ("127.0.0.1", [], []), options)
    try:
        with two_hosts() as hosts:
            _measure(report, "veth", (hosts.addresses[0], hosts.prefix(0), hosts.prefix(1)), options)
    except OSError as error:
        report.notes.append(f"not measured between network namespaces: {error}")
    return report


def _measure(report: Report, link: str, where: tuple[str, Sequence[str], Sequence[str]], options: Options) -> None:
    host, at_source, at_destination = where
    with _process([*at_source, sys.executable, _PROGRAM, "source", host, *map(str, SIZES)]) as source:
        ready = _read(source, Source)
        with _process([*at_destination, sys.executable, _PROGRAM, "destination"]) as destination:
            _read(destination, None)
            _write(destination.stdin, ready)
            modes = MODES if len(ready.pids) > 1 else tuple(mode for mode in MODES if mode != "nixl")
            for (num_bytes, rounds), entry in zip(SIZES.items(), ready.entries, strict=True):
                _write(destination.stdin, Task(entry, 3 if options.quick else options.rounds or rounds, modes))
                _add(report, link, num_bytes, _read(destination, Copied))
        for mover in ready.pids[1:]:
            before = cpu_s(mover)
            time.sleep(_IDLE_S)
            used = (cpu_s(mover) - before) / _IDLE_S
            report.bars.append(Bar(f"{link}: CPU of an idle NIXL agent, cores", used, MAX_IDLE_CPU, "at most"))


def _add(report: Report, link: str, num_bytes: int, copied: Copied) -> None:
    for mode, wall_s in copied.wall_s.items():
        report.tables["copies"].append(
            {
                "link": link,
                "MB": num_bytes / 1e6,
                "mode": mode,
                "p50 ms": 1000 * median(wall_s),
                "p99 ms": 1000 * percentile(wall_s, 0.99),
                "GB/s": num_bytes / median(wall_s) / 1e9,
                "CPU ms destination": 1000 * copied.destination_cpu_s[mode] / len(wall_s),
                "CPU ms source": 1000 * copied.source_cpu_s[mode] / len(wall_s),
            }
        )
    raw_s, tcp_s = median(copied.wall_s["raw"]), median(copied.wall_s["tcp"])
    name = f"{link}, {num_bytes / 1e6:g} MB"
    if num_bytes >= LARGE:
        report.bars.append(Bar(f"{name}: throughput of tcp / raw", raw_s / tcp_s, MIN_SHARE, "at least"))
    report.bars.append(Bar(f"{name}: latency added by tcp, ms", 1000 * (tcp_s - raw_s), MAX_ADDED_MS, "at most"))
    report.bars.append(Bar(f"{name}: pulls for a second worker", copied.num_second_pulls, 0, "at most"))


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    environ = process_environ() | {"UCX_TLS": "tcp"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    try:
        yield process
        process.communicate(timeout=30)  # ends its standard input
    finally:
        process.kill()
        process.wait()


def _read(process: subprocess.Popen[bytes], kind: type[T] | None) -> T:
    timer = threading.Timer(_ANSWER_TIMEOUT_S, process.kill)  # ends the wait
    timer.start()
    line = b"" if process.stdout is None else process.stdout.readline()
    timer.cancel()
    if not line:
        raise RuntimeError("a process of the benchmark has ended")
    return msgspec.json.decode(line, type=kind)


def _write(stream: IO[bytes] | None, message: object) -> None:
    if stream is not None:
        stream.write(msgspec.json.encode(message) + b"\n")
        stream.flush()
