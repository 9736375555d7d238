"""What other processes may send: each sequence of a message is bounded, or its cost is only that of reading it once."""

import re
import time
from pathlib import Path

import msgspec
import msgspec.inspect as inspect
import pytest

import medialane
from medialane.cluster import child_process
from medialane.prepare import messages as preparers
from medialane.store import messages as store
from medialane.transfer import peer_connection as peers
from medialane.transfer.nixl import RdmaMetadata
from medialane.transfer.nixl import agent as nixl
from medialane.transfer.nixl.mover import Offer
from medialane.types.errors import InvalidFeature, ProtocolViolation
from medialane.types.feature import HeaderFields
from medialane.types.tensor import MAX_RANK, Embeds
from medialane.vllm_bridge.engine import kv_events
from medialane.vllm_bridge.engine.embedding_connector import EmbeddingPlan
from medialane.vllm_bridge.items import features
from medialane.vllm_bridge.items.arena_tensors import WireItem
from medialane.vllm_bridge.learned import sent_tensors
from medialane.wire import connection
from medialane.wire import protocol as rpc

#: By the name with which a decoder is made in `src`.
MESSAGES = {
    "ForkRequest": child_process.ForkRequest,
    "ForkStart": child_process.ForkStart,
    "ControlRequest": preparers.ControlRequest,
    "ControlReport": preparers.ControlReport,
    "JobRequest": preparers.JobRequest,
    "JobReport": preparers.JobReport,
    "ToStore": store.ToStore,
    "FromStore": store.FromStore,
    "ToSource": peers.ToSource,
    "FromSource": peers.FromSource,
    "ToWorker": rpc.ToWorker,
    "FromWorker": rpc.FromWorker,
    "UnreadableSubmit": rpc.UnreadableSubmit,
    "Beginning": connection.Beginning,
    "ToMover": nixl.ToMover,
    "FromMover": nixl.FromMover,
    "Offer": Offer,
    "RdmaMetadata": RdmaMetadata,
    "Embeds": Embeds,
    "HeaderFields": HeaderFields,
    "WireItem": WireItem,
    "Fields": sent_tensors.Fields,
    "Values": sent_tensors.Values,
    "Dtype": sent_tensors.Dtype,
    "Shape": sent_tensors.Shape,
    "Number": sent_tensors.Number,
    "EmbeddingPlan": EmbeddingPlan,
    "PublishedBatch": kv_events.PublishedBatch,
}

#: Decoded, but not messages; the last four are what a store has written for the next one, each bounded in bytes.
NO_MESSAGES = {"dict", "SimulatedParams", "_Tokenizer", "Record", "_Record", "_Bound", "tuple"}

ITEMS = "one for each media item of a request (--media-max-items, --media-max-batch-items), each looked up once"
HOLDS = "one for each entry that the client holds, each looked up once"
TOKENS = "token ids, which are compared with the maximum length of a prompt, or those of an answer; copied once"
OWN = "settings, or counters, of a process that we have started; from no client and no preparer"
BLOCKS = "of the blocks that an engine has stored or removed; each is entered into the index once"
HEADER = "a header is bounded (MAX_HEADER_BYTES), and each value in it is visited once, to a bounded depth"
KINDS = "its keys are the kinds of processes, those of a Literal"
LOGPROBS = "of the tokens of an answer; vLLM bounds their alternatives"

#: Sequences without a bound of their own: a frame's bounds them. Reading them costs as much as receiving them.
EXPLAINED = {
    "ForkStart.argv": OWN,
    "ForkStart.environ": OWN,
    "ForkStart.pass_fds": OWN,
    "OpenedDocument.pages": "the gateway compares their number with --media-max-document-pages, and their texts",
    "Setup.environment": OWN,
    "MediaConfig.allowed_media_domains": OWN,
    "MediaConfig.allowed_media_networks": OWN,
    "MediaConfig.allowed_media_ports": OWN,
    "Ready.settings": OWN,
    "StoreHello.processor": OWN,
    "StoreHello.holds": HOLDS,
    "FindCached.refs": ITEMS,
    "CachedFound.items": ITEMS,
    "HoldEntries.ranges": ITEMS,
    "GrantPulls.ranges": ITEMS,
    "PullEntries.entries": ITEMS,
    "PassHolds.ranges": ITEMS,
    "PassHolds.embeddings": ITEMS,
    "Release.hold_ids": HOLDS,
    "EntriesHeld.hold_ids": ITEMS,
    "EntriesHeld.ranges": ITEMS,
    "PullsGranted.entries": ITEMS,
    "MediaLeased.media": "one for each lease of an owner, whose number is bounded (--media-lease-share)",
    "EntriesPulled.hold_ids": ITEMS,
    "EntriesPulled.copies": ITEMS,
    "HoldsPassed.ranges": ITEMS,
    "HoldsPassed.hold_ids": ITEMS,
    "HoldsPassed.embeddings": ITEMS,
    "PullStats.num_pulls": OWN,
    "PullStats.num_bytes": OWN,
    "PullStats.num_failed": OWN,
    "Hello.processor": OWN,
    "Hello.join_ports": OWN,
    "ExpandedPrompt.token_ids": TOKENS,
    "ExpandedPrompt.features": ITEMS,
    "ExpandedPrompt.encoder_token_ids": TOKENS,
    "UnexpandedPrompt.token_ids": TOKENS,
    "UnexpandedPrompt.media": ITEMS,
    "UnexpandedPrompt.encoder_token_ids": TOKENS,
    "EngineRequest.generated": TOKENS,
    "EngineRequest.trace_headers": "headers of a request, which are bounded at intake",
    "Payload.sizes": "one for each tensor of a request, whose sum is bounded (--rpc-max-message-bytes)",
    "WakeUp.tags": OWN,
    "PendingWork.items": "of the requests that wait in an engine",
    "ModelCard.processor": OWN,
    "ModelCard.tasks": OWN,
    "EncoderCard.widths": OWN,
    "OutputDelta.completions": "one for each of a request's completions (n)",
    "OutputDelta.prompt_token_ids": TOKENS,
    "OutputDelta.prompt_logprobs": LOGPROBS,
    "OutputDelta.placed": ITEMS,
    "OutputDelta.embedded": ITEMS,
    "OutputDelta.loaded": ITEMS,
    "OutputDelta.movers": "names of a Literal, one for each mover",
    "CompletionDelta.token_ids": TOKENS,
    "CompletionDelta.logprobs": LOGPROBS,
    "MetricChanges.memory": KINDS,
    "StoreStats.memory": KINDS,
    "StoreStats.holds": "the oldest fifty, of the store of this host, and only with --debug-holds",
    "MetricChanges.families": OWN,
    "MetricChanges.series": OWN,
    "MetricSeries.labels": OWN,
    "LoadReport.loads": OWN,
    "Read.sources": "the payload of one entry, or the descriptors of RdmaMetadata, which are bounded",
    "Read.offsets": "as Read.sources",
    "Embeds.fields": "tensors by name, whose bytes are those of an item",
    "HeaderFields.fields": HEADER,
    "Flat.slices": HEADER,
    "Nested.items": HEADER,
    "EmbeddingPlan.loads": ITEMS,
    "EmbeddingPlan.fills": ITEMS,
    "EmbeddingPlan.absent": ITEMS,
    "PublishedBatch.events": BLOCKS,
    "BlockStored.block_hashes": BLOCKS,
    "BlockStored.token_ids": BLOCKS,
    "BlockStored.extra_keys": BLOCKS,
    "BlockStored.lookahead_token_ids": BLOCKS,
    "BlockRemoved.block_hashes": BLOCKS,
}

SEQUENCES = (
    inspect.ListType,
    inspect.VarTupleType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.DictType,
    inspect.CollectionType,
)


class Walk:
    """Visits the types of a message; `unbounded` are the fields with sequences that have no maximum length."""

    def __init__(self) -> None:
        self.unbounded: set[str] = set()
        self.seen: set[type] = set()

    def visit(self, found: inspect.Type, where: str) -> None:
        if isinstance(found, SEQUENCES) and found.max_length is None:
            self.unbounded.add(where)
        if isinstance(found, inspect.StructType | inspect.NamedTupleType):
            if found.cls not in self.seen:
                self.seen.add(found.cls)
                for field in found.fields:
                    self.visit(field.type, f"{found.cls.__name__}.{field.name}")
            return
        assert not isinstance(found, inspect.DataclassType | inspect.TypedDictType), f"{where}: not visited here"
        for inner in self._within(found):
            self.visit(inner, where)

    @staticmethod
    def _within(found: inspect.Type) -> tuple[inspect.Type, ...]:
        match found:
            case inspect.Metadata(type=inner):
                return (inner,)
            case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
                return types
            case inspect.DictType(key_type=key, value_type=value):
                return key, value
            case inspect.CollectionType(item_type=inner):
                return (inner,)
        return ()


def test_every_decoded_message_is_looked_at():
    pattern = re.compile(r"\bmsgpack\.(?:Decoder\((\w+)|decode\(.*type=(\w+))")
    root = Path(medialane.__file__).parent
    sources = [path.read_text() for path in root.rglob("*.py")]
    decoded = {name for text in sources for groups in pattern.findall(text) for name in groups if name}
    assert decoded - NO_MESSAGES == MESSAGES.keys() - {"RdmaMetadata"}


def test_every_sequence_is_bounded_or_explained():
    walk = Walk()
    for name, message in MESSAGES.items():
        walk.visit(inspect.type_info(message), name)
    assert walk.unbounded == EXPLAINED.keys()


def test_walk_finds_sequences_wherever_they_are():
    class Inner(msgspec.Struct):
        bounded: preparers.Header
        pairs: dict[str, tuple[int, set[str]]]

    class Outer(msgspec.Struct):
        inner: Inner | None
        numbers: list[list[int]]

    walk = Walk()
    walk.visit(inspect.type_info(Outer), "Outer")
    assert walk.unbounded == {"Inner.pairs", "Outer.numbers"}


def hostile(number: int, dimension: int) -> dict[str, object]:
    return {"dtype": "uint8", "shape": [dimension] * number}


#: Messages of every kind of process that describe a tensor, and what decodes them.
SPEC_MESSAGES = {
    "preparer": (lambda spec: need_range(spec), preparers.decode_job_report),
    "client of a store": (
        lambda spec: ["FindEmbedding", 1, "0" * 64, feature(), spec],
        lambda body: store.decode_to_store(memoryview(body)),
    ),
    "store of another host": (lambda spec: ["EntryOpened", feature(spec)], peers.decode_from_source),
    "embeddings of a client": (
        lambda spec: {"fields": {"": {"spec": spec, "data": bytes(1)}}},
        msgspec.msgpack.Decoder(Embeds).decode,
    ),
    "header": (
        lambda spec: header({"type": "large", "index": 0, "spec": spec}),
        msgspec.msgpack.Decoder(HeaderFields).decode,
    ),
}


def need_range(spec: dict[str, object]) -> dict[str, object]:
    times = {"decode_s": 0.0, "process_s": 0.0}
    return {"type": "NeedRange", "job_id": 1, "specs": [spec], "addresses": [1], "header": b"", "size": {}, **times}


def header(value: dict[str, object]) -> dict[str, object]:
    return {"fields": [{"name": "x", "kind": {"type": "batched"}, "value": value}]}


def feature(*specs: dict[str, object]) -> dict[str, object]:
    place = {"arena": "0" * 32, "offset": 0, "nbytes": 1 << 20, "generation": 1}
    tensors = [{"type": "arena", "spec": spec, "range": place, "offset": 64} for spec in specs]
    return {"modality": "image", "mm_hash": "0" * 64, "header": b"", "tensors": tensors, "size": {}}


@pytest.mark.parametrize("dimension", [1, (1 << 64) - 1])
@pytest.mark.parametrize("number", [MAX_RANK + 1, 16_000, 495_000])
@pytest.mark.parametrize("name", SPEC_MESSAGES)
def test_shape_of_too_many_dimensions_is_refused_at_once(name, number, dimension):
    make, decode = SPEC_MESSAGES[name]
    decode(msgspec.msgpack.encode(make(hostile(2, 1))))
    body = msgspec.msgpack.encode(make(hostile(number, dimension)))
    started = time.process_time()
    with pytest.raises((msgspec.ValidationError, ProtocolViolation), match="length <= 16"):
        decode(body)
    assert time.process_time() - started < 0.05, "microseconds, and reading the frame"


def test_deeply_nested_header_is_refused():
    """Visiting a level had cost its depth for each value in it, and one level of the stack."""
    value = {"type": "nested", "items": [{"type": "scalar", "value": 1}] * 100_000}
    for _ in range(200):
        value = {"type": "nested", "items": [value]}
    encoded = msgspec.msgpack.encode(header(value))
    started = time.process_time()
    with pytest.raises(InvalidFeature, match="levels"):
        features.check_tensors(encoded, [])
    assert time.process_time() - started < 1
