"""Arenas registered with CUDA, by a fake of CUDA's calls. The real ones: tests/gpu/test_pinned_memory_gpu.py."""

import threading
from pathlib import Path

import pytest

from medialane.vllm_bridge.items.arena_tensors import ArenaResolver
from waiting import wait_until

READ_ONLY = 8


class FakeCuda:
    """`torch.cuda`, and CUDA's runtime. Registration waits for `may_register`, and ends with `error`."""

    def __init__(self):
        self.registered = {}
        self.calls = []
        self.error = 0
        self.may_register = threading.Event()
        self.may_register.set()
        self.is_used = True

    def is_initialized(self):
        return self.is_used

    def cudart(self):
        return self

    def current_device(self):
        return 3

    def set_device(self, device):
        self.calls.append(("device", device))

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        self.may_register.wait(10)
        self.calls.append(("register", nbytes, flags, is_mapped(address)))
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802 - likewise
        self.calls.append(("unregister", self.registered.pop(address), is_mapped(address)))
        return 0

    def cudaGetErrorString(self, error):  # noqa: N802 - likewise
        return f"reason {error}"


def is_mapped(address):
    return any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def cuda():
    return FakeCuda()


def attached(arena, cuda, *, pin=True):
    resolver = ArenaResolver(cuda)
    assert resolver.attach(arena.id, "/dev/shm", arena.nonce.hex(), pin=pin)
    return resolver


def test_arena_is_registered_as_read_only_on_the_models_device_and_unregistered_while_it_is_mapped(arena, cuda):
    resolver = attached(arena, cuda)
    wait_until(lambda: cuda.registered)
    resolver.detach(arena.id)
    resolver.detach(arena.id)
    size = arena.view.size_bytes
    assert cuda.calls == [("device", 3), ("register", size, READ_ONLY, True), ("unregister", size, True)]


def test_attaching_does_not_wait_for_the_registration_and_detaching_does(arena, cuda):
    cuda.may_register.clear()
    resolver = attached(arena, cuda)
    assert not cuda.registered
    detaching = threading.Thread(target=resolver.detach, args=[arena.id])
    detaching.start()
    cuda.may_register.set()
    detaching.join(10)
    assert cuda.calls[-1] == ("unregister", arena.view.size_bytes, True)


def test_refusal_is_logged_once_and_the_arena_stays_readable(arena, cuda, caplog):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    cuda.error = 801
    resolver = attached(arena, cuda)
    resolver.detach(arena.id)
    assert cuda.calls[-1][0] == "register", "what was not registered is not unregistered"
    (record,) = caplog.records
    assert "the arena is not pinned" in record.getMessage()
    assert "reason 801" in record.getMessage()


def test_process_without_cuda_registers_nothing(arena, cuda):
    cuda.is_used = False
    attached(arena, cuda).detach(arena.id)
    assert cuda.calls == []


def test_arena_of_an_engine_that_only_encodes_is_not_registered(arena, cuda):
    attached(arena, cuda, pin=False).detach(arena.id)
    assert cuda.calls == []
