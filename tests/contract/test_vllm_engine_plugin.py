"""The private seams of vLLM that let EngineCore read tensors from arenas: failures show what an upgrade broke."""

import asyncio
import copy
import gc
import inspect
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.inputs import mm_input
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, core, core_client
from vllm.v1.engine.output_processor import OutputProcessor

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.types.errors import GenerationFailed, HandoverFailed, InvalidFeature
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import MediaSize
from medialane.types.request import EngineRequest, ExpandedPrompt, KvTransfer, UnexpandedPrompt
from medialane.types.tensor import TensorSpec
from medialane.vllm_bridge.engine.engine import VllmEngine
from medialane.vllm_bridge.engine.engine_core import install
from medialane.vllm_bridge.engine.kv_transfer import Transfers
from medialane.vllm_bridge.engine.plugin import register
from medialane.vllm_bridge.items import (
    RESOLVER,
    ArenaDecoder,
    ArenaEncoder,
    ArenaItem,
    Unreadable,
    arena_tensors,
    encode_item,
)
from medialane.vllm_bridge.items.arena_tensors import KEY

SPEC = TensorSpec("float32", (100, 50))


@pytest.fixture
def arena(arena):
    yield arena
    arena_tensors.RESOLVER.detach(arena.id)


@pytest.fixture
def entry(arena):
    """A tensor in the arena, 0, 1, 2, ..., and its descriptor."""
    reservation = arena.reserve(layout([SPEC])[1])
    (descriptor,) = describe(reservation.range, [SPEC])
    values = torch.arange(5000, dtype=torch.float32)
    arena.view.tensor(descriptor, writable=True)[:] = values.numpy().tobytes()
    pin = arena.publish(reservation, "key", Feature("image", "key", b"", (descriptor,), MediaSize()))
    yield descriptor
    pin.release()


@pytest.fixture
def engine():
    """As much of an EngineCore as the seams need: its methods."""
    install()
    engine = core.EngineCore.__new__(core.EngineCore)
    engine.vllm_config = SimpleNamespace(is_mm_encoder_only=False)
    return engine


def item_of(data):
    return MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data, MultiModalBatchedField())})


def request(item):
    feature = MultiModalFeatureSpec(
        data=item, modality="image", identifier="a", mm_position=PlaceholderRange(offset=0, length=4), mm_hash="a"
    )
    return EngineCoreRequest(
        request_id="r-12345678",
        external_req_id="r",
        prompt_token_ids=[1, 2, 3, 4],
        mm_features=[feature],
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def sent(descriptor, view):
    """The frames of a request whose tensor lies at `descriptor`."""
    item = ArenaItem(HEADER, [descriptor], [view.tensor(descriptor)])
    return [bytes(frame) for frame in ArenaEncoder().encode(request(item))]


def received(frames):
    return ArenaDecoder(EngineCoreRequest).decode(frames)


def pixel_values(found):
    return found.mm_features[0].data["pixel_values"].data


def attach(engine, arena, nonce=None):
    return engine.medialane_attach(arena.id, "/dev/shm", (nonce or arena.nonce).hex())


def test_frontend_encodes_every_request_with_the_replaced_attribute():
    source = inspect.getsource(core_client)
    assert source.count("MsgpackEncoder(") == source.count("self.encoder = MsgpackEncoder(oob_tensor_consumer=") == 1
    assert source.count("*self.encoder.encode(") == 3, "requests of both clients, and utilities"


def test_engine_core_looks_up_its_decoder_by_name_with_our_arguments():
    source = inspect.getsource(core.EngineCoreProc.process_input_sockets)
    assert "MsgpackDecoder(\n            EngineCoreRequest, oob_tensor_provider=self.tensor_ipc_receiver" in source
    assert "request = self.preprocess_add_request(req)" in source
    assert source.index("add_request_decoder.decode") < source.index("try:\n") < source.index("preprocess_add_request")


def test_tensor_travels_as_a_descriptor_and_is_a_view_of_the_arena(engine, arena, entry):
    assert attach(engine, arena)
    frames = sent(entry, arena.view)
    assert sum(map(len, frames)) < 1000
    found = pixel_values(received(frames))
    assert found.tolist() == torch.arange(5000, dtype=torch.float32).view(SPEC.shape).tolist()
    arena.view.tensor(entry, writable=True)[:4] = b"\0\0\x80\x3f"
    assert found[0, 0] == 1.0


def test_arena_with_wrong_or_missing_nonce_is_not_attached(engine, arena, entry):
    assert not attach(engine, arena, b"x" * 16)
    assert not engine.medialane_attach("f" * 32, "/dev/shm", arena.nonce.hex())
    assert not engine.medialane_attach("../../etc/passwd", "/dev/shm", arena.nonce.hex())


def test_detached_arena_is_unmapped_with_its_last_item(engine, entry, arena):
    other = Arena.create(ArenaConfig(size_bytes=16 << 20))
    attach(engine, arena)
    attach(engine, other)
    held = received(sent(entry, arena.view))
    num_mapped = [count_mapped(each) for each in (arena, other)]
    for each in (arena, other, other):
        engine.medialane_detach(each.id)
    assert [count_mapped(each) for each in (arena, other)] == [num_mapped[0], num_mapped[1] - 1]
    assert pixel_values(held)[0, 1] == 1.0
    del held
    assert count_mapped(arena) == num_mapped[0] - 1
    other.close()


def count_mapped(arena):
    return Path("/proc/self/maps").read_text().count(arena.id)


def test_freed_entry_fails_only_its_request(engine, arena, entry):
    attach(engine, arena)
    frames = sent(entry, arena.view)
    stale = msgspec.msgpack.decode(frames[0])
    frames = [msgspec.msgpack.encode(_with_meta(stale, generation=10**6)), *frames[1:]]
    refused = received(frames)
    with pytest.raises(InvalidFeature):
        engine.preprocess_add_request(refused)
    assert engine.medialane_refused("r")
    assert not engine.medialane_refused("another")
    assert pixel_values(received(sent(entry, arena.view))).numel() == 5000


class FailingEngine(VllmEngine):
    """A worker's engine whose EngineCore fails each request; `asked` are the utilities that were called. They
    do not return in time without `answers`."""

    def __init__(self, item, *, answers=True):
        self._answers = answers
        self._arenas = {"a" * 32}  # EngineCore has mapped an arena
        self._reader = SimpleNamespace(
            engine_input=self._engine_input,
            embeddings=lambda _request, _uses: None,
            named_for_engine=lambda x: x,
            lora=lambda _request: None,
            params=lambda _request: SamplingParams(),
        )
        self.llm = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None))
        self._adapters = SimpleNamespace(using=lambda _lora, *, exact: nullcontext())
        self._embeddings = SimpleNamespace(detach=_done)
        self._transfers = Transfers()
        self._release_timeout_s = 1.0
        self._arena_directory = "/dev/shm"
        self._item = item
        self.asked = []

    async def _engine_input(self, _request, _tensors, _embeddings):
        place = PlaceholderRange(offset=0, length=4)
        return mm_input(
            [1, 2, 3, 4], MultiModalKwargsItems({"image": [self._item]}), {"image": ["a"]}, {"image": [place]}
        )

    async def _outputs(self, request, engine_input, _embeddings, _lora):
        engine_input.clear()
        completion = CompletionOutput(0, "", [], None, None, finish_reason="error")
        yield RequestOutput(request.request_id, None, None, None, [completion], finished=True)

    async def _ask(self, method, *args, timeout_s):
        self.asked.append(method)
        if not self._answers:
            raise GenerationFailed("no answer")
        return [True]


async def _done(*_args):
    pass


MEDIA = (MediaPayload("image", "a", b"", ()),)


@pytest.mark.parametrize("prompt", [ExpandedPrompt([1], MEDIA), UnexpandedPrompt([1], MEDIA, stage="decoded")])
async def test_failure_of_a_request_without_tensors_in_an_arena_does_not_ask_engine_core(prompt):
    failing = FailingEngine(item_of(torch.zeros(4)))
    (delta,) = [delta async for delta in failing.generate(EngineRequest("r", prompt, b""), [])]
    assert delta.completions[0].finish_reason == "error"
    assert failing.asked == []


async def test_failure_of_a_request_with_tensors_in_an_arena_asks_engine_core(arena, entry):
    failing = FailingEngine(ArenaItem(HEADER, [entry], [arena.view.tensor(entry)]))
    with pytest.raises(HandoverFailed):
        async for _ in failing.generate(EngineRequest("r", ExpandedPrompt([1], MEDIA), b""), []):
            pass
    asked = failing.asked
    del failing
    gc.collect()  # the traceback references frames, which reference views of the arena
    assert asked == ["medialane_refused"]


@pytest.mark.parametrize(
    ("params", "error"), [(PoolingParams(task="embed"), MultiModalCacheMissError), (None, InvalidFeature)]
)
def test_pooling_request_that_cannot_be_read_fails_by_the_only_error_that_the_front_end_survives(params, error):
    install()
    request = SimpleNamespace(
        mm_features=Unreadable(), pooling_params=params, request_id="r", external_req_id="theirs", lora_request=None
    )
    with pytest.raises(error):
        core.EngineCore.preprocess_add_request(None, request)
    assert RESOLVER.has_refused("theirs")


def test_failed_pooling_request_is_an_output_of_the_front_end():
    """What EngineCore sends for the error above, processed by vLLM's own front end."""
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="theirs",
    )
    processor.add_request(request, None)
    failed = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, mm_cache_miss_hashes=["r"])
    (found,) = processor.process_outputs([failed]).request_outputs
    assert found.error is not None


class WaitingEngine(FailingEngine):
    """EngineCore has the request once `submitted` is set. When that is aborted, it has `kept` blocks, or not."""

    def __init__(self, *, gets_input, kept=None):
        super().__init__(item_of(torch.zeros(4)))
        self.llm.notify_kv_transfer_request_rejected = self._reject
        self.begun, self.rejected = asyncio.Event(), []
        self._gets_input, self._kept = gets_input, kept

    async def _reject(self, _request_id, params):
        self.rejected.append(params)

    async def _engine_input(self, *args):
        if not self._gets_input:
            await self._wait()
        return await super()._engine_input(*args)

    async def _outputs(self, request, *_args):
        try:
            await self._wait()
        finally:
            if self._kept is not None:
                self._transfers.note_kept(request.request_id, self._kept)
        yield

    async def _wait(self):
        self.begun.set()
        await asyncio.Event().wait()


async def aborted(engine, transfer):
    """Return what the request still has as output."""
    deltas = []

    async def run():
        async for delta in engine.generate(EngineRequest("r", ExpandedPrompt([1]), b"", kv_transfer=transfer), []):
            deltas.append(delta)  # noqa: PERF401 - what came before the abort counts

    running = asyncio.create_task(run())
    await engine.begun.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    return deltas


KV_PARAMS = {"remote_request_id": "p"}
OF_KV_PARAMS = msgspec.json.encode(KV_PARAMS)


@pytest.mark.parametrize(("gets_input", "rejected"), [(False, [KV_PARAMS]), (True, [])])
async def test_abort_before_engine_core_has_the_request_rejects_the_blocks_that_it_was_to_read(gets_input, rejected):
    engine = WaitingEngine(gets_input=gets_input)
    engine.llm.vllm_config.kv_transfer_config = SimpleNamespace(has_connector=lambda _name: False)
    assert await aborted(engine, KvTransfer("receive", OF_KV_PARAMS)) == []
    assert engine.rejected == rejected


@pytest.mark.parametrize(("kept", "params"), [(KV_PARAMS, [OF_KV_PARAMS]), (None, [])])
async def test_abort_that_crosses_the_output_of_a_prompt_leaves_the_parameters_of_its_blocks(kept, params):
    engine = WaitingEngine(gets_input=True, kept=kept)
    assert [delta.kv_params for delta in await aborted(engine, KvTransfer("send"))] == params


async def test_arena_that_engine_core_did_not_confirm_in_time_is_unmapped_as_well():
    stalled = FailingEngine(None, answers=False)
    assert not await stalled.attach_arena("b" * 32, bytes(16))
    await stalled.detach_arena("b" * 32)
    assert stalled.asked == ["medialane_attach", "medialane_detach"]


def _with_meta(message, **changes):
    """The message with fields of its descriptor replaced: `tensor_offset`, or what its entry's range has."""

    def walk(value):
        if isinstance(value, dict) and KEY in value:
            header, (tensor,) = msgspec.msgpack.decode(value[KEY])
            own = {"offset": changes["tensor_offset"]} if "tensor_offset" in changes else {}
            of_entry = {name: new for name, new in changes.items() if name != "tensor_offset"}
            return {KEY: wire_of(header, tensor | own | {"range": tensor["range"] | of_entry})}
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, list) else value

    return walk(message)


def wire_of(header, *tensors):
    return msgspec.msgpack.encode((header, tensors))


HEADER = encode_item(item_of(torch.zeros(SPEC.shape)))[0]
WHERE = {
    "type": "arena",
    "spec": {"dtype": "float32", "shape": [100, 50]},
    "range": {"arena": "f" * 32, "offset": 4096, "nbytes": 20480, "generation": 1},
    "offset": 128,
}


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(None, id="nothing"),
        pytest.param(b"", id="no bytes"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(msgspec.msgpack.encode([]), id="no header"),
        pytest.param(wire_of(b""), id="empty header"),
        pytest.param(wire_of(b"\x80", WHERE), id="header of no fields"),
        pytest.param(wire_of(HEADER, WHERE), id="arena that is not mapped"),
        pytest.param(wire_of(HEADER, WHERE | {"offset": -64}), id="before its entry"),
        pytest.param(b"\x91" * 5000, id="deep"),
    ],
)
def test_resolver_never_raises(wire):
    assert arena_tensors.ArenaResolver().resolve(wire) is None


@pytest.mark.parametrize(
    "change",
    [{"offset": 64}, {"offset": 1 << 40}, {"nbytes": 128}, {"tensor_offset": 0}, {"tensor_offset": 1 << 20}],
    ids=str,
)
def test_out_of_bounds_descriptor_is_rejected(engine, arena, entry, change):
    attach(engine, arena)
    message = _with_meta(msgspec.msgpack.decode(sent(entry, arena.view)[0]), **change)
    with pytest.raises(InvalidFeature):
        engine.preprocess_add_request(received([msgspec.msgpack.encode(message)]))


def test_other_items_are_encoded_unchanged():
    small, large = torch.arange(3), torch.arange(1000)
    for data in (small, large):
        frames = [bytes(frame) for frame in ArenaEncoder().encode(request(item_of(data)))]
        assert torch.equal(pixel_values(received(frames)), data)


def test_vllms_out_of_band_tensors_are_encoded_unchanged():
    away = []

    def consumer(tensor):
        away.append(tensor)
        return {"number": len(away) - 1}

    consumer.new_message = away.clear
    data = torch.arange(1000)
    frames = ArenaEncoder(oob_tensor_consumer=consumer).encode(request(item_of(data)))
    decoder = ArenaDecoder(EngineCoreRequest, oob_tensor_provider=lambda dtype, shape, meta: away[meta["number"]])
    assert pixel_values(decoder.decode([bytes(frame) for frame in frames])) is data


def test_arena_item_behaves_like_a_plain_item(arena, entry):
    item = ArenaItem(HEADER, [entry], [arena.view.tensor(entry)])
    assert list(copy.copy(item)) == list(item.copy()) == list(item) == ["pixel_values"]
    assert torch.equal(item.get_data()["pixel_values"].view(-1), torch.arange(5000, dtype=torch.float32))


def test_item_whose_embedding_is_loaded_travels_with_its_small_fields_alone():
    fields = {"pixel_values": torch.zeros(5000), "image_grid_thw": torch.tensor([1, 20, 28])}
    elems = {name: MultiModalFieldElem(data, MultiModalBatchedField()) for name, data in fields.items()}
    item = ArenaItem(encode_item(MultiModalKwargsItem(elems))[0])
    (found,) = received([bytes(frame) for frame in ArenaEncoder().encode(request(item))]).mm_features
    assert list(found.data) == list(item) == ["image_grid_thw"]
    assert found.data["image_grid_thw"].data.tolist() == [1, 20, 28]


def test_item_with_tensors_not_matching_its_header_is_not_built(arena, entry):
    for datas in ([], [arena.view.tensor(entry)[:-4]]):
        with pytest.raises(InvalidFeature):
            ArenaItem(HEADER, [entry], datas)


def test_engine_core_of_another_parent_is_left_alone(engine):
    assert not engine.medialane_die_with(1 if os.getppid() != 1 else 2)


def test_recorded_rejections_are_bounded():
    resolver = arena_tensors.ArenaResolver()
    for number in range(arena_tensors.MAX_REFUSED + 10):
        resolver.refuse(str(number))
    assert not resolver.has_refused("9")
    assert resolver.has_refused("10")


def test_installation_is_idempotent():
    register()
    once = core.EngineCore.preprocess_add_request
    register()
    install()
    assert core.EngineCore.preprocess_add_request is once
    assert core.MsgpackDecoder is ArenaDecoder


def test_plugin_is_registered_with_vllm():
    from importlib.metadata import entry_points

    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "medialane"]
    assert found.load() is register


def test_engine_input_is_built_as_in_vllm():
    assert set(inspect.signature(mm_input).parameters) >= {"prompt_token_ids", "mm_kwargs", "mm_hashes", "cache_salt"}
