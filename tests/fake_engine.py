"""A deterministic engine without a model, for tests; it can fail like a real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import zip_longest
from typing import Protocol

import msgspec

from medialane.testing.simulated import SimulatedParams
from medialane.testing.simulated.sequence import BlockPool, sequence_of
from medialane.types.admin import (
    AdminCall,
    AdminResult,
    IsPaused,
    IsSleeping,
    PauseGeneration,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    WakeUp,
)
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    MedialaneError,
    PromptRejected,
    WorkerLost,
    from_report,
    to_report,
)
from medialane.types.feature import EmbeddingUse
from medialane.types.hashing import content_hash
from medialane.types.kv_blocks import KvEventBatch
from medialane.types.request import (
    CompletionDelta,
    EmbeddingCounts,
    EngineRequest,
    EngineTimes,
    ExpandedPrompt,
    ModelCard,
    OutputDelta,
    PooledPart,
    WorkerLoad,
    merge_deltas,
)
from medialane.types.tensor import TensorDescriptor, TensorSpec

FAKE_CARD = ModelCard(model="fake", max_model_len=8192, block_size=16, processor={"model": "fake"})

#: More than all tests fill.
NUM_BLOCKS = 1 << 20

#: Output token ids are below this.
VOCABULARY = 512

#: Of an item; its embedding has at least as many.
DIGEST_BYTES = 32


class FakeParams(msgspec.Struct, frozen=True):
    """Sampling parameters of the fake engine, as JSON in `EngineRequest.sampling_params`. The output of a pooling
    request has `max_tokens` parts; one that does not stream has all tokens in one part."""

    max_tokens: int = 4
    token_s: float = 0.0
    streams: bool = True


class FakeContinuable:
    """`types.request.Continuable` of a request to the fake engine; `obstacle` is given."""

    num_choices = 1

    def __init__(self, sampling_params: bytes, obstacle: str = "") -> None:
        self.obstacle = obstacle
        self._params = msgspec.json.decode(sampling_params, type=FakeParams)

    def rest(self, index: int, token_ids: Sequence[int], *, cumulative_logprob: float | None) -> FakeRest:
        left = self._params.max_tokens - len(token_ids)
        return FakeRest(index, msgspec.json.encode(msgspec.structs.replace(self._params, max_tokens=left)))


class FakeRest(msgspec.Struct, frozen=True):
    """`types.request.RestOfChoice` of the fake engine, whose text does not depend on what precedes it."""

    index: int
    sampling_params: bytes

    def restore(self, completion: CompletionDelta) -> CompletionDelta:
        return msgspec.structs.replace(completion, index=self.index)


class EmbeddingMemory(Protocol):
    """How a fake engine reads and writes embeddings: the arena is mapped by others."""

    def read(self, tensor: TensorDescriptor) -> bytes:
        """Raises HandoverFailed."""
        ...

    async def write(self, tensor: TensorDescriptor, data: bytes) -> None:
        """Write, unless the range has been freed or written meanwhile."""
        ...


class KvBlocks:
    """What fake engines keep for each other: `kept`, by the parameters that they give, the prompt and its items."""

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[bytes, list[bytes]]] = {}
        self.num_sent = 0
        #: Whether reading them fails: the reader then computes the prompt.
        self.is_broken = False

    def keep(self, inputs: bytes, items: list[bytes]) -> bytes:
        self.num_sent += 1
        params = b'{"number": %d}' % self.num_sent
        self.kept[params] = inputs, items
        return params

    def read(self, params: bytes, inputs: bytes) -> list[bytes] | None:
        """Return the items of these inputs if the blocks were read, and so are kept no longer."""
        kept, items = self.kept.pop(params, (b"", []))
        return items if kept == inputs and not self.is_broken else None


class FakeEngine:
    """Outputs token ids derived from all ids before them and the bytes of the features, one delta each.

    With `memory`, its `card` may have an encoder: an item's embedding is a digest of its bytes, repeated, and the same
    tokens follow from it. `num_encoded` and `num_loaded` count items; encoding one takes `encode_s`.

    Like the real one it reads tensors while it generates, and `release_s` longer; `num_reading` counts the requests
    whose tensors it may read, `num_requests` all that it has accepted. Prompts stay in its KV cache. `attaches` is the
    result of `attach_arena`. With `kv_blocks`, engines that have the same ones transfer prompts: `num_computed` are
    prompt tokens that were neither cached nor transferred, an encoder runs for no item that was transferred.
    Administrative calls are recorded in `calls` and only change the state that calls can query. `die` makes it fail
    like a lost engine, `stall` hang.
    """

    def __init__(
        self,
        *,
        card: ModelCard = FAKE_CARD,
        attaches: bool = True,
        release_s: float = 0.0,
        encode_s: float = 0.0,
        memory: EmbeddingMemory | None = None,
        kv_blocks: KvBlocks | None = None,
    ) -> None:
        self.card = card
        self.num_computed = 0
        self.kv_blocks = kv_blocks or KvBlocks()
        self.num_encoded = 0
        self.num_loaded = 0
        self.encode_s = encode_s
        self._memory = memory
        self.num_reading = 0
        self.num_requests = 0
        self.num_pings = 0
        self.arenas: list[str] = []
        self.calls: list[AdminCall] = []
        self.is_sleeping = False
        self.is_paused = False
        self.closed = False
        self.listener: Callable[[KvEventBatch], None] | None = None
        self._pool = BlockPool(NUM_BLOCKS)
        self.attaches = attaches
        self.release_s = release_s
        self._failure: MedialaneError | None = None
        self._steps = asyncio.Event()
        self._steps.set()
        self._computing = False

    def die(self, error: MedialaneError | None = None) -> None:
        """Make every later call raise `error` (WorkerLost if None)."""
        self._failure = error or WorkerLost("the worker's engine has died")

    def recover(self) -> None:
        self._failure = None

    def stall(self, *, computing: bool = False) -> None:
        """Neither reply nor output anything until `resume`, like a stopped process; or like one in a long step."""
        self._steps.clear()
        self._computing = computing

    def resume(self) -> None:
        self._steps.set()

    @property
    def embedding_counts(self) -> EmbeddingCounts:
        return EmbeddingCounts(loaded=self.num_loaded, encoded=self.num_encoded)

    def loads(self) -> list[WorkerLoad]:
        return [WorkerLoad(num_running=self.num_reading)]

    def watch_blocks(self, listener: Callable[[KvEventBatch], None]) -> None:
        self.listener = listener

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        self._check_alive()
        self.arenas.append(arena)
        return self.attaches

    async def detach_arena(self, arena: str) -> None:
        if arena in self.arenas:
            self.arenas.remove(arena)

    async def generate(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        transfer = request.kv_transfer
        if transfer is not None and transfer.step == "release":
            self.kv_blocks.kept.pop(transfer.params, None)
            yield OutputDelta(request.request_id, [], finished=True)
            return
        params = _params(request)
        self._check(request, tensors)
        num_cached = self._prefill(request)
        num_tokens = len(request.prompt.token_ids) + len(request.generated)
        inputs, num_transferred = msgspec.msgpack.encode((request.prompt.token_ids, request.generated)), 0
        if (read := self._read(request, inputs)) is not None:
            num_transferred = num_tokens - 1 - num_cached
        self.num_computed += num_tokens - num_cached - num_transferred
        self.num_requests += 1
        self.num_reading += 1
        preceding, unsent = list(request.generated), list[OutputDelta]()
        first_at = 0.0
        try:
            if not num_transferred:
                await self._encode(request, tensors, embeddings)
            if transfer is not None and transfer.step == "send":
                await asyncio.sleep(params.token_s)  # time: as an engine takes
                await self._steps.wait()
                self._check_alive()
                sent = _delta(request, 0, 0, num_cached, finished=True)
                kept = self.kv_blocks.keep(inputs, self._items(tensors, embeddings))
                sent = msgspec.structs.replace(sent, kv_params=kept)
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:  # the abort crosses the output
                    yield sent
                    raise
                yield sent
                return
            for number in range(params.max_tokens):
                await asyncio.sleep(params.token_s)  # time: as an engine takes
                await self._steps.wait()
                self._check_alive()
                items = read if request.without_media else self._items(tensors, embeddings)
                finished = number == params.max_tokens - 1
                if request.is_pooling:
                    inputs = msgspec.msgpack.encode((request.prompt.token_ids, items, number))
                    yield _pooled(request, params, inputs, num_cached, finished=finished)
                    continue
                inputs = msgspec.msgpack.encode((request.prompt.token_ids, items, preceding))
                token = int(content_hash(inputs)[:8], 16) % VOCABULARY
                preceding.append(token)
                first_at = first_at or time.monotonic()
                delta = _delta(request, number, token, num_cached + num_transferred, finished=finished)
                unsent.append(
                    msgspec.structs.replace(delta, num_transferred_tokens=num_transferred) if number == 0 else delta
                )
                if params.streams or finished:
                    yield _at_once(unsent, time.monotonic() - first_at)
                    unsent.clear()
        finally:
            try:
                await asyncio.sleep(self.release_s)  # time: as an engine takes
                await self._steps.wait()
            finally:
                self.num_reading -= 1

    async def administer(self, call: AdminCall) -> AdminResult:
        self._check_alive()
        self.calls.append(call)
        match call:
            case Sleep() | WakeUp():
                self.is_sleeping = isinstance(call, Sleep)
                return None if self.is_sleeping else True
            case PauseGeneration() | ResumeGeneration():
                self.is_paused = isinstance(call, PauseGeneration)
            case IsSleeping():
                return self.is_sleeping
            case IsPaused():
                return self.is_paused
            case ResetPrefixCache():
                return True
        return None

    async def ping(self, timeout_s: float) -> None:
        self.num_pings += 1
        self._check_alive()
        try:
            async with asyncio.timeout(timeout_s):
                await self._steps.wait()
        except TimeoutError:
            raise GenerationFailed("the engine did not respond") from None

    async def used_cpu_s(self) -> float | None:
        is_stopped = not (self._steps.is_set() or self._computing)
        return None if is_stopped else asyncio.get_running_loop().time()

    async def close(self) -> None:
        self.closed = True

    def _read(self, request: EngineRequest, inputs: bytes) -> list[bytes] | None:
        """Return the prompt's items if its blocks were read. Raises HandoverFailed if they must be, and were not."""
        transfer = request.kv_transfer
        is_reader = transfer is not None and transfer.step == "receive"
        items = self.kv_blocks.read(transfer.params, inputs) if is_reader else None
        if items is None and request.without_media:
            raise HandoverFailed("a prompt without its media must be computed")
        return items

    async def _encode(
        self,
        request: EngineRequest,
        tensors: Sequence[Sequence[memoryview]],
        embeddings: Sequence[EmbeddingUse | None],
    ) -> None:
        """Encode every item that is not loaded, once, and write its embedding where it is to be kept."""
        done: set[str] = set()
        for item, datas, use in zip_longest(request.prompt.media, tensors, embeddings):
            if item.mm_hash in done:
                continue
            done.add(item.mm_hash)
            if use is not None and use.is_filled:
                self.num_loaded += 1
                continue
            await asyncio.sleep(self.encode_s)  # time: as an engine takes
            self.num_encoded += 1
            if use is not None and self._memory is not None:
                await self._memory.write(use.tensor, _embedding(_digest(datas), use.tensor.spec.nbytes))

    def _items(self, tensors: Sequence[Sequence[memoryview]], embeddings: Sequence[EmbeddingUse | None]) -> list[bytes]:
        """Return a digest of each item, from its embedding if that is loaded."""
        digests = []
        for datas, use in zip_longest(tensors, embeddings):
            if use is None or not use.is_filled or self._memory is None:
                digests.append(_digest(datas))
                continue
            data = self._memory.read(use.tensor)
            is_right = data == _embedding(data[:DIGEST_BYTES], len(data))
            digests.append(data[:DIGEST_BYTES] if is_right else data)
        return digests

    def _prefill(self, request: EngineRequest) -> int:
        """Cache and report the prompt's blocks; return the number of its tokens that were already cached."""
        if not isinstance(request.prompt, ExpandedPrompt):
            return 0
        size, num_tokens = self.card.block_size, len(request.prompt.token_ids) + len(request.generated)
        sequence = sequence_of(request, block_size=size, params=SimulatedParams(), max_tokens=1)
        cached = self._pool.find(sequence.cacheable_ids())
        self._pool.use(cached)
        sequence.start(cached)
        sequence.blocks += self._pool.take(num_tokens // size - len(cached))
        sequence.store_full(self._pool, num_tokens)
        self._pool.free(reversed(sequence.restart()))
        if (events := self._pool.take_events()) and self.listener is not None:
            self.listener(KvEventBatch(0, events, time.time()))
        return len(cached) * size

    def _check(self, request: EngineRequest, tensors: Sequence[Sequence[memoryview]]) -> None:
        self._check_alive()
        prompt = request.prompt
        num_tokens = len(prompt.token_ids) + len(request.generated)
        if num_tokens >= self.card.max_model_len:
            raise PromptRejected(f"{num_tokens} prompt tokens exceed max_model_len {self.card.max_model_len}")
        for item, datas in zip(prompt.media, tensors, strict=True):
            if [d.nbytes for d in datas] != [t.spec.nbytes for t in item.tensors]:
                raise InvalidFeature("a tensor's size does not match its shape")

    def _check_alive(self) -> None:
        if self._failure is not None:  # a new error for each: its traceback keeps what the request has mapped
            raise from_report(to_report(self._failure))


def _params(request: EngineRequest) -> FakeParams:
    try:
        return msgspec.json.decode(request.sampling_params, type=FakeParams)
    except msgspec.DecodeError as error:
        raise PromptRejected("malformed sampling parameters") from error


def _digest(datas: Sequence[memoryview]) -> bytes:
    return bytes.fromhex(content_hash("".join(map(content_hash, datas)).encode()))


def _embedding(digest: bytes, num_bytes: int) -> bytes:
    return (digest * (num_bytes // DIGEST_BYTES + 1))[:num_bytes]


def _pooled(
    request: EngineRequest, params: FakeParams, inputs: bytes, num_cached: int, *, finished: bool
) -> OutputDelta:
    data = bytes.fromhex(content_hash(inputs))
    spec = TensorSpec("uint8", (params.max_tokens, len(data)))
    return OutputDelta(
        request.request_id,
        [],
        finished=finished,
        num_cached_tokens=num_cached,
        pooled=PooledPart(spec, memoryview(data)),
    )


def _at_once(deltas: Sequence[OutputDelta], decode_s: float) -> OutputDelta:
    whole = merge_deltas(deltas)
    return whole if whole.times is None else msgspec.structs.replace(whole, times=EngineTimes(decode_s=decode_s))


def _delta(request: EngineRequest, number: int, token: int, num_cached: int, *, finished: bool) -> OutputDelta:
    first = number == 0
    completion = CompletionDelta(0, f"<{token}>", [token], finish_reason="length" if finished else None)
    is_expanded = isinstance(request.prompt, ExpandedPrompt)
    return OutputDelta(
        request.request_id,
        [completion],
        finished=finished,
        prompt_token_ids=request.prompt.token_ids if first and not is_expanded else None,
        num_cached_tokens=num_cached if is_expanded else None,
        times=EngineTimes() if first else None,
    )
