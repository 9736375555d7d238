"""The zero-copy hand-over from a worker's front end to its EngineCore: tensors received as descriptors become views of
a mapped arena.

Theory of operation. A worker's front end sends requests to its EngineCore as msgpack. An item whose tensors are in
arenas that EngineCore has mapped is sent by `ArenaEncoder` as `{"medialane": bytes}`, the bytes being a `WireItem`:
the item's header and the locations of its tensors. EngineCore's input thread decodes requests with `MsgpackDecoder`, a
name that it looks up in its module when it starts: `seams.engine_core` replaces it by a subclass that builds such
items over views.

An exception in that thread would end it silently, and every later request would hang. So the resolver never raises:
an item that it cannot resolve becomes an empty item, and the request is marked. A marked request is rejected one step
later, in `preprocess_add_request`, whose exceptions vLLM does catch: only this request fails, before it is scheduled,
and nothing is computed or cached from missing data.

Both are private seams of vLLM 0.32, pinned by `tests/contract/test_vllm_engine_plugin.py`; `engine_core` installs them.

A process that runs a model registers a mapped arena with CUDA: its pages become pinned memory.

Without that, vLLM copies a large tensor of an item to pinned memory of its own, from which the device reads; one that
is in pinned memory it leaves there (`vllm.multimodal.inputs._nested_tensors_h2d`). So the copy, by the thread that also
schedules, is saved: 2.8 ms of 18.8 MB on an H100's host (`medialane bench gpu`). Tensors that vLLM joins to a batch are
copied to pinned memory as ever. The mapping stays read-only.

*One call, in its own thread.* It takes 0.1 s per GiB, in which the launch of a kernel waits. It is one call since a
copy across two registered ranges fails, and in a thread since CUDA keeps an error for the next kernel of the thread.
Until it is done, or if it fails, tensors are not pinned, and vLLM copies them.

*The device reads later.* A copy from pinned memory does not wait for the device. It is in the stream ahead of the
step's forward pass, whose output EngineCore waits for; and a request's hold ends after all steps that were in progress
have completed. So the device has read an entry before it can be reused. An engine that only encodes has no output to
wait for: its arenas are not registered.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, SupportsInt

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

from medialane.arena import ArenaView
from medialane.types.errors import HandoverFailed
from medialane.types.setting import format_bytes
from medialane.types.tensor import TensorDescriptor, TensorDescriptors
from medialane.vllm_bridge.items.features import check_tensors, decode_item, decode_small_fields
from medialane.vllm_bridge.seams.engine import EngineCoreRequest, ItemDecoder, ItemEncoder

logger = logging.getLogger(__name__)

#: cudaHostRegisterReadOnly of driver_types.h: the device will only read. Required for a read-only mapping.
_READ_ONLY = 8


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime that are needed (`torch.cuda.cudart()`)."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SupportsInt: ...  # noqa: N802 - CUDA's name

    def cudaHostUnregister(self, address: int) -> SupportsInt: ...  # noqa: N802 - likewise

    def cudaGetErrorString(self, error: SupportsInt) -> str: ...  # noqa: N802 - likewise


class Cuda(Protocol):
    """What is used of `torch.cuda`."""

    def is_initialized(self) -> bool: ...

    def cudart(self) -> CudaRuntime: ...

    def current_device(self) -> int: ...

    def set_device(self, device: int) -> None: ...


class PinnedMemory:
    """A mapping that is registered, being registered, or was refused. The owner calls `release` before it unmaps it."""

    def __init__(self, memory: memoryview, runtime: CudaRuntime, enter_device: Callable[[], object]) -> None:
        self._runtime = runtime
        self._enter_device = enter_device
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._nbytes = memory.nbytes
        self._is_registered = False
        self._thread = threading.Thread(target=self._register, name="pin-arena", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Return when the mapping is not registered. Idempotent. No copy from it may be in progress."""
        self._thread.join()  # without a timeout, as munmap has none: it must not be unmapped before
        if self._is_registered:
            self._is_registered = False
            error = self._runtime.cudaHostUnregister(self._address)
            if int(error):
                logger.warning("CUDA has not released an arena: %s", self._runtime.cudaGetErrorString(error))

    def _register(self) -> None:
        self._enter_device()
        started = time.monotonic()
        error = self._runtime.cudaHostRegister(self._address, self._nbytes, _READ_ONLY)
        if int(error):
            reason = self._runtime.cudaGetErrorString(error)
            logger.warning(
                "the arena is not pinned: features are copied once more on their way to the GPU (%s)", reason
            )
            return
        self._is_registered = True
        size, seconds = format_bytes(self._nbytes), time.monotonic() - started
        logger.info("the arena (%s) is pinned: the GPU reads features from it (took %.1f s)", size, seconds)


def pinned(memory: memoryview, cuda: Cuda) -> PinnedMemory | None:
    """Have a mapping registered; None if this process does not use CUDA. If CUDA refuses, that is logged, and tensors
    are copied once more."""
    if not cuda.is_initialized():
        return None
    return PinnedMemory(memory, cuda.cudart(), partial(cuda.set_device, cuda.current_device()))


#: The only key of an item that is sent as a `WireItem`. No model has a field of this name.
KEY = "medialane"

#: Rejected requests that are remembered: the front end queries them as soon as it sees the error.
MAX_REFUSED = 4096


class WireItem(msgspec.Struct, frozen=True, array_like=True):
    """An item as sent to EngineCore: its header (`features`) and the tensors that it names, in its order; none for an
    item whose embedding is loaded."""

    header: bytes
    tensors: TensorDescriptors


_DECODER = msgspec.msgpack.Decoder(WireItem)


def _decoded(item: WireItem, datas: Sequence[memoryview]) -> MultiModalKwargsItem:
    return decode_item(item.header, datas) if item.tensors else decode_small_fields(item.header)


class ArenaResolver:
    """The arenas that this process has mapped, and the requests that it rejected.

    EngineCore's main thread attaches, detaches and queries; its input thread resolves and refuses. No lock: each
    update is a single dict operation.
    """

    def __init__(self, cuda: Cuda = torch.cuda) -> None:
        self._cuda = cuda
        self._views: dict[str, ArenaView] = {}
        self._pinned: dict[str, PinnedMemory] = {}
        self._refused: dict[str, None] = {}

    def attach(self, arena: str, directory: str, nonce: str, *, pin: bool = False) -> bool:
        """Map an arena; True if it holds the nonce (hex). `pin` it for the device that this process uses, if any."""
        if arena in self._views:
            return self._views[arena].nonce.hex() == nonce
        try:
            view = self._views[arena] = ArenaView.open(arena, directory, nonce=bytes.fromhex(nonce))
        except HandoverFailed as error:
            logger.warning("EngineCore cannot map the arena: %s", error.message)
            return False
        if pin and (registered := pinned(view.memory, self._cuda)) is not None:
            self._pinned[arena] = registered
        return True

    def detach(self, arena: str) -> None:
        """Unmap an arena that no request reads any more. Idempotent.

        vLLM's requests are reference cycles (their block hasher): finished ones still hold their items, and so the
        mapping, until they are garbage-collected.
        """
        if (registered := self._pinned.pop(arena, None)) is not None:
            registered.release()
        if (view := self._views.pop(arena, None)) is not None:
            view.close()
            gc.collect()

    def resolve(self, wire: bytes) -> MultiModalKwargsItem | None:
        """Return the item over views of the arenas; None if it cannot be read. Never raises."""
        try:
            item = _DECODER.decode(wire)
            return _decoded(item, [self._views[t.range.arena].tensor(t) for t in item.tensors])
        except Exception:  # see the theory of operation: no exception may reach vLLM's thread
            logger.exception("an item cannot be read from its arena; its request is rejected")
            return None

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor. Raises HandoverFailed."""
        view = self._views.get(descriptor.range.arena)
        if view is None:
            raise HandoverFailed(f"the arena {descriptor.range.arena} is not mapped")
        return view.tensor(descriptor)

    def is_readable(self, descriptor: TensorDescriptor) -> bool:
        """Return whether `tensor` returns its bytes. Reads a few words of memory."""
        try:
            self.tensor(descriptor).release()
        except HandoverFailed:
            return False
        return True

    def refuse(self, request_id: str) -> None:
        """Remember a request that could not be read; beyond MAX_REFUSED the oldest is dropped."""
        self._refused[request_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def has_refused(self, request_id: str) -> bool:
        return request_id in self._refused


#: One per process: vLLM creates the decoders and passes no arguments of ours.
RESOLVER = ArenaResolver()


class ArenaDecoder(ItemDecoder):
    """vLLM's decoder, extended by items sent as a `WireItem`."""

    _faulted = False

    def decode(self, bufs: Any) -> Any:
        self._faulted = False
        decoded = super().decode(bufs)
        if self._faulted and isinstance(decoded, EngineCoreRequest):
            decoded.mm_features = Unreadable()
        return decoded

    def decode_item(self, obj: dict[str, Any]) -> MultiModalKwargsItem:
        if KEY not in obj:
            return super().decode_item(obj)
        item = RESOLVER.resolve(obj[KEY])
        self._faulted = self._faulted or item is None
        return MultiModalKwargsItem() if item is None else item


class Unreadable:
    """Value of `EngineCoreRequest.mm_features` if the features could not be read."""


_ENCODER = msgspec.msgpack.Encoder()


class ArenaItem(MultiModalKwargsItem):  # type: ignore[misc]  # vllm is not typed
    """An item sent to EngineCore as its header and the locations of its tensors. Decoded in this process only if its
    fields are accessed, which for an item with tensors does not happen on the request path.

    `tensors` and their bytes are the ones that the header names, in its order; raises InvalidFeature if they do not
    match. Without any, it has only its small fields, for an engine that loads its embedding.
    """

    def __init__(
        self, header: bytes, tensors: Sequence[TensorDescriptor] = (), datas: Sequence[memoryview] = ()
    ) -> None:
        # vLLM's own __init__ would fill `data`, which is lazy here.
        if tensors:
            check_tensors(header, datas)
        self.wire = WireItem(header, tuple(tensors))
        self._datas = datas

    @cached_property
    def data(self) -> dict[str, MultiModalFieldElem]:
        return _decoded(self.wire, self._datas).data

    def __copy__(self) -> MultiModalKwargsItem:
        # UserDict's own accesses `__dict__["data"]`, which does not exist before first use.
        return MultiModalKwargsItem(self.data)


class ArenaEncoder(ItemEncoder):
    """vLLM's encoder; an `ArenaItem` is sent as its `WireItem`."""

    def encode_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        if isinstance(item, ArenaItem):
            return {KEY: _ENCODER.encode(item.wire)}
        return super().encode_item(item)
