"""The two processes between which vLLM transfers features, without a model: its front end and its EngineCore. And
medialane's store, with the same features in its arena.

Both ends are vLLM's own code: `AsyncMPClient` with its encoder and sockets, and EngineCore's input and output threads
with their decoders. `EngineCoreEnd` replaces the scheduler and the model: it reads the tensor, responds, and reports
the times to the benchmark. Clocks are CLOCK_MONOTONIC, the same for all processes of the host.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import queue
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import uvloop
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.multimodal.inputs import PlaceholderRange as VllmRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
    core,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.tensor_ipc import TensorIpcReceiver, TensorIpcSender
from vllm.v1.serial_utils import UtilityResult

from local_store import host_store, store_link
from medialane.arena import Arena, ArenaConfig, Pin, describe, layout
from medialane.store import StoreEntries
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.feature import EmbeddingUse, Feature, MediaPayload
from medialane.types.kv_blocks import KvEventBatch
from medialane.types.media import MediaSize
from medialane.types.request import (
    CompletionDelta,
    EmbeddingCounts,
    EngineRequest,
    ExpandedPrompt,
    ModelCard,
    OutputDelta,
    WorkerLoad,
)
from medialane.types.tensor import TensorDescriptor
from medialane.vllm_bridge.engine import plugin
from medialane.vllm_bridge.items import ArenaEncoder, ArenaItem, encode_item, to_vllm_range
from medialane.vllm_bridge.learned import placeholder_of
from medialane.wire import RpcConfig
from medialane.worker import RpcServer, Worker, WorkerConfig

#: Rows of patches: 1176 bytes each as uint8, four times that as float32 (Qwen2.5-VL; 3996 rows are a 1024x768 image).
SIZES: dict[str, tuple[int, torch.dtype]] = {
    "0.5 MB": (428, torch.uint8),
    "4.7 MB": (3996, torch.uint8),
    "18.8 MB": (3996, torch.float32),
    "150 MB": (31888, torch.float32),
}
ROW = 1176
NUM_TOKENS, PLACEHOLDER = 1016, (4, 999)

#: The field of an item with its large tensor, as named in the Qwen family.
PIXELS = "pixel_values"

CARD = ModelCard(model="none", max_model_len=8192, block_size=16, processor={"model": "none"})


#: The hand-over path of a request without features: the cost of vLLM's hop alone.
NO_FEATURE = "no feature"

#: Prefix of the ids of requests whose every byte EngineCore reads.
READ_WHOLE = "whole"

_LIBC = ctypes.CDLL(None)
_PARAMS = SamplingParams(max_tokens=1)


class Seen(NamedTuple):
    """EngineCore's record of one request: when the view was usable; for a request that is read whole, how long that
    took, and the sum of its bytes."""

    request_id: str
    usable_ns: int
    read_ns: int
    total: int


class Addresses(NamedTuple):
    """Addresses of the processes' sockets."""

    engine_input: str
    engine_output: str
    worker: str
    store: str
    arena_directory: str


def token_ids() -> list[int]:
    return [7] * NUM_TOKENS


def make_item(size: str) -> MultiModalKwargsItem:
    """Create an item like Qwen2.5-VL's processor, of any size."""
    rows, dtype = SIZES[size]
    generator = torch.Generator().manual_seed(rows)
    noise = torch.randint(0, 256, (rows, ROW), dtype=torch.uint8, generator=generator)
    grid = torch.tensor([1, 2, rows // 2])
    return MultiModalKwargsItem(
        {
            PIXELS: MultiModalFieldElem(noise.to(dtype), MultiModalFlatField(slices=[slice(0, rows)])),
            "image_grid_thw": MultiModalFieldElem(grid, MultiModalBatchedField()),
        }
    )


def make_specs() -> list[MultiModalFeatureSpec]:
    """Create one feature of each size, in the front end's heap."""
    place = VllmRange(*PLACEHOLDER)
    return [MultiModalFeatureSpec(make_item(size), "image", size, place, size) for size in SIZES]


class Looked(NamedTuple):
    """When the input thread could read a request's tensor, and that tensor."""

    usable_ns: int
    pixels: torch.Tensor | None


class EngineCoreEnd(core.EngineCoreProc):  # type: ignore[misc]
    """EngineCore with its socket threads only."""

    def __init__(self, tensors: Queue[Any], seen: Connection) -> None:
        self.tensor_ipc_receiver = TensorIpcReceiver(tensors)
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self._seen = seen

    def run(self, addresses: Addresses) -> None:
        """Respond to requests until the benchmark terminates this process."""
        started = threading.Event()
        threads: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (self.process_input_sockets, ([addresses.engine_input], None, bytes(2), started)),
            (self.process_output_sockets, ([addresses.engine_output], None, 0)),
        ]
        for target, args in threads:
            threading.Thread(target=target, args=args, daemon=True).start()
        while True:
            kind, request = self.input_queue.get()
            if kind == EngineCoreRequestType.UTILITY:
                client, call_id, method, args = request
                answer = EngineCoreOutputs(
                    utility_output=UtilityOutput(call_id, result=UtilityResult(getattr(self, method)(*args)))
                )
            else:
                client, answer = 0, self._answer(*request)
            self.output_queue.put_nowait((client, answer))

    def _answer(self, request: EngineCoreRequest, looked: Looked) -> EngineCoreOutputs:
        """Report the record, and finish the request."""
        total = 0
        started = time.perf_counter_ns()
        if looked.pixels is not None and request.request_id.startswith(READ_WHOLE):
            total = checksum(looked.pixels)
        self._seen.send(Seen(request.request_id, looked.usable_ns, time.perf_counter_ns() - started, total))
        return EngineCoreOutputs(outputs=[EngineCoreOutput(request.request_id, [1], finish_reason=FinishReason.STOP)])

    def forget_pages(self) -> bool:
        """Drop this process's page tables of the arenas, so that the next read faults every page."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(".arena"):
                first, end = (int(address, 16) for address in line.split()[0].split("-"))
                assert _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED) == 0
        return True

    def _make_ready_response(self) -> EngineCoreReadyResponse:
        facts = dict.fromkeys(EngineCoreReadyResponse.__dataclass_fields__, 1)
        words = {"dp_stats_address": None, "dtype": "bfloat16", "vllm_version": "", "instance_id": ""}
        flags = {"supports_lora": False, "supports_draft_weight_updates": False, "enable_sleep_mode": False}
        return EngineCoreReadyResponse(
            **facts | words | flags | {"kv_events_config": None, "weight_transfer_backend": None}
        )


def run_engine_core(addresses: Addresses, tensors: Queue[Any], seen: Connection) -> None:
    """Main function of the EngineCore process."""
    torch.set_num_threads(1)
    core.EngineCore.preprocess_add_request = look  # called first by the input thread with a decoded request
    plugin.register()
    EngineCoreEnd(tensors, seen).run(addresses)


def look(_engine: EngineCoreEnd, request: EngineCoreRequest) -> tuple[EngineCoreRequest, Looked]:
    """Touch both ends of the tensor, if there is one: from here on it is usable.

    The tensor is returned because the input thread removes the features from the request afterwards.
    """
    if not request.mm_features:
        return request, Looked(time.perf_counter_ns(), None)
    (feature,) = request.mm_features
    tensor: torch.Tensor = feature.data[PIXELS].data
    pixels = tensor.view(-1)
    assert pixels[0].item() >= 0 <= pixels[-1].item()
    return request, Looked(time.perf_counter_ns(), tensor)


def checksum(pixels: torch.Tensor) -> int:
    """Return a sum that depends on every byte. All sizes here are multiples of 8."""
    return int(pixels.view(-1).view(torch.int64).sum())


def run_store(addresses: Addresses, published: Connection) -> None:
    """Main function of the store's process: one feature of each size is in the arena, and held."""
    uvloop.run(_store(addresses, published))


async def _store(addresses: Addresses, published: Connection) -> None:
    arena = Arena.create(ArenaConfig(size_bytes=256 << 20, directory=addresses.arena_directory))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        arena.prefault(threading.Event())
        pins = [_publish(arena, size) for size in SIZES]
        async with host_store(addresses.store, arena):
            published.send({pin.value.mm_hash: pin.value for pin in pins})
            await stop.wait()
    finally:
        arena.close()


def _publish(arena: Arena, size: str) -> Pin[Feature]:
    header, specs, buffers = encode_item(make_item(size))
    reservation = arena.reserve(layout(specs)[1])
    tensors = describe(reservation.range, specs)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        arena_view = reservation.buffer
        start = tensor.offset - 64
        arena_view[start : start + buffer.nbytes] = buffer
    return arena.publish(reservation, size, Feature("image", size, header, tensors, MediaSize(width=1024, height=768)))


class FrontEnd:
    """vLLM's front end of one EngineCore; sends a feature over each of the hand-over paths, one request at a time.

    For medialane's path it is a worker's engine (implements `worker.Engine`).
    """

    def __init__(self, addresses: Addresses, tensors: Queue[Any]) -> None:
        self._directory = addresses.arena_directory
        self._sender = TensorIpcSender(tensors)
        self._client = AsyncMPClient(
            vllm_config=_client_config(),
            executor_class=None,
            log_stats=False,
            client_addresses={"input_address": addresses.engine_input, "output_address": addresses.engine_output},
        )
        self._client.encoder = ArenaEncoder()
        self.card = CARD
        self.embedding_counts = EmbeddingCounts()

    def loads(self) -> list[WorkerLoad]:
        return [WorkerLoad()]

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        """There is no KV cache."""

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        return bool(await self._client.call_utility_async("medialane_attach", arena, self._directory, nonce.hex()))

    async def used_cpu_s(self) -> float | None:
        return time.process_time()

    async def detach_arena(self, arena: str) -> None:
        """Nothing to do: the process exits with the run."""

    async def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        """Do what `VllmEngine.generate` does with tensors, with the same encoder."""
        prompt = request.prompt
        assert isinstance(prompt, ExpandedPrompt)
        features = prompt.features
        items = [ArenaItem(f.header, _descriptors(f), datas) for f, datas in zip(features, tensors, strict=True)]
        specs = [
            MultiModalFeatureSpec(item, f.modality, f.mm_hash, to_vllm_range(placeholder_of(f)), f.mm_hash)
            for f, item in zip(features, items, strict=True)
        ]
        await self._exchange(_request(request.request_id, prompt.token_ids, specs))
        yield OutputDelta(request.request_id, [CompletionDelta(0, "", [1], finish_reason="stop")], finished=True)

    async def send_heap(
        self, way: str, request_id: str, token_ids: list[int], specs: list[MultiModalFeatureSpec]
    ) -> list[int]:
        """Send features whose tensors are in this process's heap by one of vLLM's own paths: (sent, answered) in ns."""
        self._client.encoder.oob_tensor_consumer = self._sender if way == "torch_shm" else None
        started = time.perf_counter_ns()
        await self._exchange(_request(request_id, token_ids, specs))
        return [started, time.perf_counter_ns()]

    async def forget_pages(self) -> None:
        await self._client.call_utility_async("forget_pages")

    async def administer(self, call: AdminCall) -> AdminResult:
        raise NotImplementedError

    async def ping(self, timeout_s: float) -> None:
        """Nothing to check: the benchmark notices if a process exits."""

    async def close(self) -> None:
        self._client.shutdown()

    async def _exchange(self, request: EngineCoreRequest) -> None:
        await self._client.add_request_async(request)
        (output,) = (await self._client.get_output_async()).outputs
        assert output.request_id == request.request_id


class HeapRequest(NamedTuple):
    """A request of the benchmark: send item number `item` by `way`. An empty `way` requests to forget pages."""

    way: str
    request_id: str = ""
    item: int = 0


def run_front_end(
    addresses: Addresses,
    tensors: Queue[Any],
    requests: Connection,
) -> None:
    """Main function of the worker's process: an RPC server for medialane's path, and `requests` for vLLM's."""
    torch.set_num_threads(1)
    uvloop.run(_serve(addresses, tensors, requests))


async def _serve(addresses: Addresses, tensors: Queue[Any], requests: Connection) -> None:
    front_end = FrontEnd(addresses, tensors)
    directory = addresses.arena_directory
    async with store_link(addresses.store, directory=directory) as link:
        worker = Worker(front_end, WorkerConfig(), arena_directory=directory, host_arena=StoreEntries(link))
        server = RpcServer(worker, RpcConfig())
        await server.serve(addresses.worker)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.watch())  # maps the store's arena
            await _send_wishes(front_end, requests)


async def _send_wishes(front_end: FrontEnd, requests: Connection) -> None:
    """Send vLLM's way what the benchmark requests, until it terminates this process."""
    specs = make_specs()
    waiting = asyncio.Event()
    asyncio.get_running_loop().add_reader(requests.fileno(), waiting.set)
    requests.send("ready")
    while True:
        await waiting.wait()
        request: HeapRequest = requests.recv()
        waiting.clear()
        if request.way:
            fresh = [] if request.way == NO_FEATURE else [_on_fresh_heap(specs[request.item])]
            requests.send(await front_end.send_heap(request.way, request.request_id, token_ids(), fresh))
        else:
            await front_end.forget_pages()
            requests.send(None)


def _descriptors(feature: MediaPayload) -> list[TensorDescriptor]:
    found = [tensor for tensor in feature.tensors if isinstance(tensor, TensorDescriptor)]
    assert len(found) == len(feature.tensors)
    return found


def _on_fresh_heap(spec: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    """Copy the tensors, as every request has its own from a processor (`torch_shm` moves them away while sending)."""
    item = MultiModalKwargsItem({name: _cloned(elem) for name, elem in spec.data.items()})
    return MultiModalFeatureSpec(item, spec.modality, spec.identifier, spec.mm_position, spec.mm_hash)


def _cloned(elem: Any) -> Any:
    return type(elem)(data=elem.data.clone(), field=elem.field)


def _request(request_id: str, token_ids: list[int], specs: list[MultiModalFeatureSpec]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=specs,
        sampling_params=_PARAMS,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _client_config() -> Any:
    """The attributes of a VllmConfig that `AsyncMPClient` reads."""
    whole = VllmConfig()
    model = SimpleNamespace(multimodal_config=None, max_model_len=1)
    return SimpleNamespace(parallel_config=whole.parallel_config, cache_config=whole.cache_config, model_config=model)
