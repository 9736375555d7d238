"""`medialane bench gpu`: features and embeddings between the arena and a GPU.

Needs one CUDA device; without one there are no rows. The arena is a real one, mapped read-only as EngineCore maps it.

*register*: time for `cudaHostRegister` over a mapping whose pages are allocated. `refused` is CUDA's reason.

*feature to device*: one feature, at a place in the arena that this process has not read before (`first`), or has
(`again`). `vLLM` is the code of its `_nested_tensors_h2d` for a tensor that is not pinned: a copy to pinned memory,
whose allocator is warm, and an asynchronous transfer. `pageable` is a plain `.to(device)`. One thread copies, as in
vLLM when it serves. `pinned arena` is the asynchronous transfer from the registered mapping, as vLLM makes it of a
pinned tensor. `host` is the time until the call returns, by which the scheduler's thread is blocked; `done` until the
data are on the device.

*embedding, device busy*: the same of an embedding, while the device has `busy_ms` of work queued in the stream.
`blocking` waits for that work. `load, pinned` is queued behind it. `save, side stream` copies to pinned memory in a
stream of its own, after an event of the encoder's.

*launches while registering*: the longest and the median time to launch a kernel, while a thread registers an arena.

*between processes*: one feature in device memory, read by another process through CUDA IPC, against through the arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from harness import Bar, Options, Report, median, table
from medialane.arena import Arena, ArenaConfig, ArenaView
from medialane.vllm_bridge.items.arena_tensors import CudaRuntime

NAME = "gpu"
ABOUT = "features and embeddings between the arena and a GPU: pinned or not"

MIB = 1 << 20
GIB = 1 << 30
#: A 1024x768 image of Qwen2.5-VL: 4004 patches of 1176 float32.
FEATURE_BYTES = 4004 * 1176 * 4
#: Its embedding in a 7B model: 1001 tokens of 3584 bfloat16.
EMBEDDING_BYTES = 1001 * 3584 * 2

_READ_ONLY = 8  # cudaHostRegisterReadOnly
_BUSY_MS = 20.0


def run(options: Options) -> Report:
    report = Report(NAME)
    if not torch.cuda.is_available():
        report.notes.append("there is no CUDA device: nothing was measured")
        return report
    torch.zeros(1, device="cuda")
    torch.set_num_threads(1)  # as vLLM does when it serves
    report.notes.append(f"device: {torch.cuda.get_device_name()}, {_driver()}, torch {torch.__version__}")
    report.notes.append(f"read-only host registration supported (attribute 113): {_attribute(113)}")
    rounds = options.rounds or (4 if options.quick else 40)
    sizes = (GIB // 4,) if options.quick else (GIB, 4 * GIB)
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "feature to device": lambda: _features(rounds),
        "embedding, device busy": lambda: _embeddings(max(4, rounds // 4)),
        "register": lambda: [row for size in sizes for row in _register(size)],
        "launches while registering": lambda: _launches(sizes[-1]),
        "between processes": lambda: _between_processes(rounds),
    }
    for name, measure in parts.items():
        try:
            report.tables[name] = measure()
            print(name, table(report.tables[name]), sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001 - a device is lent for minutes: the other parts are measured
            report.notes.append(f"{name}: not measured: {type(error).__name__}: {error}")
    report.bars += _bars(report)
    return report


def _bars(report: Report) -> list[Bar]:
    bars = []
    sent = {row["way"]: row["host_ms"] for row in report.tables.get("feature to device", ()) if row["page"] == "first"}
    if "pinned arena" in sent:
        ratio = float(str(sent["vLLM"])) / float(str(sent["pinned arena"]))
        bars.append(Bar("host time of a feature's transfer: vLLM's copy / pinned arena", ratio, 10, "at least"))
    loaded = {row["way"]: row["host_ms"] for row in report.tables.get("embedding, device busy", ())}
    if "load, pinned" in loaded:
        ratio = float(str(loaded["load, blocking"])) / float(str(loaded["load, pinned"]))
        bars.append(Bar("host time of loading an embedding, device busy: blocking / pinned", ratio, 10, "at least"))
    return bars


@contextlib.contextmanager
def _arena(size: int) -> Iterator[tuple[Arena, str]]:
    with tempfile.TemporaryDirectory(prefix="medialane-bench-", dir="/dev/shm") as directory:
        arena = Arena.create(ArenaConfig(size_bytes=size, directory=directory))
        try:
            arena.prefault(threading.Event())
            yield arena, directory
        finally:
            arena.close()


@contextlib.contextmanager
def _mapped(arena: Arena, directory: str, *, writable: bool = False) -> Iterator[ArenaView]:
    view = ArenaView.open(arena.id, directory, writable=writable)
    try:
        yield view
    finally:
        view.close()


def _address(view: ArenaView) -> int:
    return torch.frombuffer(view.memory, dtype=torch.uint8).data_ptr()


def _register(size: int) -> list[dict[str, object]]:
    rows = []
    with _arena(size) as (arena, directory):
        for mapping, flag in (("read-only", _READ_ONLY), ("read-only", 0), ("writable", 0), ("made read-only", 0)):
            with _mapped(arena, directory, writable=mapping != "read-only") as view:
                rows.append({"GiB": size / GIB, "mapping": mapping, "flags": flag} | _registered(view, mapping, flag))
    return rows


def _registered(view: ArenaView, mapping: str, flag: int) -> dict[str, object]:
    address, size = _address(view), view.size_bytes
    started = time.perf_counter()
    error = _host_register(address, size, flag)
    seconds = time.perf_counter() - started
    row: dict[str, object] = {"s_per_GiB": seconds / size * GIB, "refused": error, "views_pinned": "", "release_s": 0.0}
    if error:
        return row
    if mapping == "made read-only":
        _protect(address, size)
    tensor = torch.frombuffer(view.memory, dtype=torch.uint8)[MIB : MIB + FEATURE_BYTES].view(torch.float32)
    row["views_pinned"] = tensor.is_pinned()
    on_device = tensor.to("cuda", non_blocking=True).cpu()
    assert torch.equal(on_device.view(torch.int32), tensor.view(torch.int32))
    across = torch.frombuffer(view.memory, dtype=torch.uint8)[-FEATURE_BYTES:]
    assert across.is_pinned()
    del tensor, across
    started = time.perf_counter()
    _runtime().cudaHostUnregister(address)
    row["release_s"] = time.perf_counter() - started
    return row


def _host_register(address: int, size: int, flags: int) -> str:
    """Return why CUDA refuses. In a thread of its own: the next kernel of a thread raises its last error."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_host_register_here, address, size, flags).result()


def _host_register_here(address: int, size: int, flags: int) -> str:
    runtime = _runtime()
    error = runtime.cudaHostRegister(address, size, flags)
    return runtime.cudaGetErrorString(error) if int(error) else ""


def _protect(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ)


def _vllm(x: torch.Tensor) -> torch.Tensor:
    x = x.new_empty(x.shape, pin_memory=True).copy_(x)
    return x.to("cuda", non_blocking=True)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.to("cuda", non_blocking=True)


def _features(rounds: int) -> list[dict[str, object]]:
    with _arena(GIB) as (arena, directory):
        _fill(arena)
        rows: list[dict[str, object]] = []
        for way, send in (("vLLM", _vllm), ("pageable", _plain)):
            with _mapped(arena, directory) as view:
                rows += _feature_rows(way, send, view, rounds)
        with _pinned(arena, directory) as view:
            return rows + _feature_rows("pinned arena", _plain, view, rounds)


@contextlib.contextmanager
def _pinned(arena: Arena, directory: str) -> Iterator[ArenaView]:
    """A registered mapping: read-only, or writable where the driver does not register the former."""
    for writable, flags in ((False, _READ_ONLY), (True, 0)):
        with _mapped(arena, directory, writable=writable) as view:
            if not _host_register(_address(view), view.size_bytes, flags):
                yield view
                torch.cuda.synchronize()
                _runtime().cudaHostUnregister(_address(view))
                return
    raise RuntimeError("no mapping can be registered")


def _fill(arena: Arena) -> None:
    with arena.view.memory as memory:
        target = torch.frombuffer(memory, dtype=torch.uint8)[4 * MIB :]
        noise = torch.randint(0, 256, (64 * MIB + 1,), dtype=torch.uint8)
        for first in range(0, target.numel() - noise.numel(), noise.numel()):
            target[first : first + noise.numel()].copy_(noise)
        del target


def _feature_rows(
    way: str, send: Callable[[torch.Tensor], torch.Tensor], view: ArenaView, rounds: int
) -> list[dict[str, object]]:
    whole = torch.frombuffer(view.memory, dtype=torch.uint8)
    step = (FEATURE_BYTES + 4095) // 4096 * 4096
    _vllm(torch.empty(FEATURE_BYTES, dtype=torch.uint8))  # the pinned allocator and the device's are warm
    torch.cuda.synchronize()
    rows: list[dict[str, object]] = []
    for page in ("first", "again"):
        times = []
        for number in range(rounds):
            first = 4 * MIB + number * step
            times.append(_timed(send, whole[first : first + FEATURE_BYTES].view(torch.float32)))
        host, done = (median(one) * 1e3 for one in zip(*times, strict=True))
        rows.append({"way": way, "page": page, "MB": FEATURE_BYTES / 1e6, "host_ms": host, "done_ms": done})
    del whole
    return rows


def _timed(send: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> tuple[float, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    sent = send(tensor)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    del sent
    return returned - started, done - started


class _Work:
    """Keeps the device busy for about `_BUSY_MS`."""

    def __init__(self) -> None:
        self._matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._one()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            self._one()
        torch.cuda.synchronize()
        self._count = max(1, round(_BUSY_MS / ((time.perf_counter() - started) / 20 * 1e3)))

    def _one(self) -> None:
        torch.mm(self._matrix, self._matrix)

    def queue(self) -> None:
        for _ in range(self._count):
            self._one()


def _embeddings(rounds: int) -> list[dict[str, object]]:
    work, side = _Work(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
    output = torch.randn(1001, 3584, device="cuda").to(torch.bfloat16)
    with _arena(GIB) as (arena, directory), _mapped(arena, directory, writable=True) as view:
        pageable = _slots(view, 4 * MIB, rounds)
        copies: dict[str, Callable[[torch.Tensor], Any]] = {
            "load, blocking": lambda t: t.to("cuda", copy=True),
            "save, blocking": lambda t: t.copy_(output),
        }
        rows = [_busy_row(way, copy, pageable, work) for way, copy in copies.items()]
        if error := _host_register(_address(view), view.size_bytes, 0):
            raise RuntimeError(error)
        copies = {
            "load, pinned": lambda t: t.to("cuda", copy=True, non_blocking=True),
            "save, pinned, same stream": lambda t: t.copy_(output, non_blocking=True),
            "save, side stream": lambda t: _save_aside(t, output, side),
        }
        rows += [_busy_row(way, copy, pageable, work) for way, copy in copies.items()]
        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(_address(view))
        del pageable, copies
    return rows


def _slots(view: ArenaView, first: int, rounds: int) -> list[torch.Tensor]:
    whole = torch.frombuffer(view.memory, dtype=torch.uint8)
    step = (EMBEDDING_BYTES + 4095) // 4096 * 4096
    places = range(first, first + rounds * step, step)
    return [whole[place : place + EMBEDDING_BYTES].view(torch.bfloat16).view(1001, 3584) for place in places]


def _save_aside(target: torch.Tensor, output: torch.Tensor, side: torch.cuda.Stream) -> None:
    encoded = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(side):
        side.wait_event(encoded)
        target.copy_(output, non_blocking=True)
        side.record_event()


def _busy_row(
    way: str, copy: Callable[[torch.Tensor], Any], slots: list[torch.Tensor], work: _Work
) -> dict[str, object]:
    for slot in slots:
        copy(slot)
    torch.cuda.synchronize()
    times = []
    for slot in slots:
        work.queue()
        started = time.perf_counter()
        copy(slot)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        times.append((returned - started, time.perf_counter() - started))
    host, done = (median(one) * 1e3 for one in zip(*times, strict=True))
    return {"way": way, "MB": EMBEDDING_BYTES / 1e6, "busy_ms": _BUSY_MS, "host_ms": host, "done_ms": done}


def _launches(size: int) -> list[dict[str, object]]:
    rows = []
    with _arena(size) as (arena, directory):
        with _pinned(arena, directory) as view:
            writable = view.writable
        for chunk in (size, GIB, GIB // 4):
            with _mapped(arena, directory, writable=writable) as view:
                rows.append({"GiB": size / GIB, "pieces_GiB": chunk / GIB} | _launches_meanwhile(view, chunk))
    return rows


def _launches_meanwhile(view: ArenaView, chunk: int) -> dict[str, object]:
    first, size = _address(view), view.size_bytes
    pieces = range(first, first + size, chunk)
    flags = 0 if view.writable else _READ_ONLY
    errors: list[str] = []

    def register() -> None:
        errors.extend(filter(None, (_host_register_here(at, min(chunk, first + size - at), flags) for at in pieces)))

    one = torch.zeros(1, device="cuda")
    thread = threading.Thread(target=register)
    started = time.perf_counter()
    thread.start()
    times = [0.0]
    while thread.is_alive():
        before = time.perf_counter()
        one.add_(1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started
    row: dict[str, object] = {
        "took_s": seconds,
        "median_ms": statistics.median(times) * 1e3,
        "longest_ms": max(times) * 1e3,
        "refused": "; ".join(errors[:1]),
        "across_pieces": "" if errors or chunk == size else _across(view, chunk),
    }
    if not errors:
        for at in pieces:
            _runtime().cudaHostUnregister(at)
    return row


def _across(view: ArenaView, chunk: int) -> str:
    """Return whether a tensor that begins in one registered piece and ends in the next can be sent."""
    tensor = torch.frombuffer(view.memory, dtype=torch.uint8)[chunk - MIB : chunk - MIB + FEATURE_BYTES]
    try:
        sent = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return "equal" if torch.equal(sent.cpu(), tensor) else "differs"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _between_processes(rounds: int) -> list[dict[str, object]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_handles, args=(theirs, rounds))
    reader.start()
    try:
        ours.recv()  # it has a context on the device
        times = []
        for _ in range(rounds):
            tensor = torch.randn(4004, 1176, device="cuda")
            torch.cuda.synchronize()
            started = time.perf_counter()
            handle = torch.multiprocessing.reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch
            ours.send((handle, float(tensor.sum())))
            read_s, equal = ours.recv()
            times.append((time.perf_counter() - started, read_s))
            assert equal
    finally:
        ours.close()
        reader.join(10)
        reader.kill()
    both, read = (median(one) * 1e3 for one in zip(*times, strict=True))
    return [{"way": "CUDA IPC", "MB": FEATURE_BYTES / 1e6, "sent_and_answered_ms": both, "opened_and_copied_ms": read}]


def _read_handles(pipe: Any, rounds: int) -> None:
    torch.zeros(1, device="cuda")
    pipe.send("ready")
    for _ in range(rounds):
        (rebuild, arguments), total = pipe.recv()
        started = time.perf_counter()
        copied = rebuild(*arguments).clone()
        torch.cuda.synchronize()
        read_s = time.perf_counter() - started
        pipe.send((read_s, abs(float(copied.sum()) - total) < 1e-2 * max(1.0, abs(total))))


def _runtime() -> CudaRuntime:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call, no-any-return]  # torch


def _attribute(number: int) -> int:
    value = ctypes.c_int(-1)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return value.value


def _driver() -> str:
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
