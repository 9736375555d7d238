"""A request to an engine, its outputs, the routing types; and how an answer that has begun goes on at another worker:
what the gateway asks of vLLM's types, which only the bridge knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from medialane.types.feature import MAX_HEADER_BYTES, Feature, MediaPayload, MediaSpan, MoverName, WantedEmbedding
from medialane.types.hashing import embedding_key
from medialane.types.media import STAGES, StageName
from medialane.types.tensor import Dtype, TensorSpec


class ExpandedPrompt(msgspec.Struct, frozen=True, tag="expanded"):
    """Prompt of a stage that `is_processed`: expanded token ids, and features with their placeholders; without
    features, a text prompt.

    `options` are the request's processor options, canonical JSON: the worker needs them to check the placeholders.
    `encoder_token_ids` are as in `PreparedPrompt`.
    """

    token_ids: list[int]
    features: tuple[MediaPayload, ...] = ()
    options: bytes = b"{}"
    encoder_token_ids: list[int] | None = None

    @property
    def expanded_token_ids(self) -> list[int]:
        """The token ids in which the features' placeholders are."""
        return self.token_ids if self.encoder_token_ids is None else self.encoder_token_ids

    @property
    def media(self) -> tuple[MediaPayload, ...]:
        return self.features

    def with_media(self, media: Sequence[MediaPayload]) -> ExpandedPrompt:
        return msgspec.structs.replace(self, features=tuple(media))

    def __repr__(self) -> str:
        return f"ExpandedPrompt({len(self.token_ids)} tokens, {len(self.features)} features)"


class UnexpandedPrompt(msgspec.Struct, frozen=True, tag="source"):
    """Prompt of the other stages: token ids whose placeholders are not expanded, and the items that the worker
    processes, in the order of their modality.

    `options` are the request's processor options, canonical JSON. For a model with encoder and decoder,
    `encoder_token_ids` is the encoder's prompt, for which the items are, and `token_ids` the decoder's.
    """

    token_ids: list[int]
    media: tuple[MediaPayload, ...]
    options: bytes = b"{}"
    stage: StageName = "url"
    encoder_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if STAGES[self.stage].is_processed:
            raise ValueError(f"a prompt of stage {self.stage} must be expanded")

    def with_media(self, media: Sequence[MediaPayload]) -> UnexpandedPrompt:
        return msgspec.structs.replace(self, media=tuple(media))

    def __repr__(self) -> str:
        return f"UnexpandedPrompt({len(self.token_ids)} tokens, {len(self.media)} items {self.stage})"


Prompt = ExpandedPrompt | UnexpandedPrompt


class KvTransfer(msgspec.Struct, frozen=True, array_like=True):
    """What a request does with KV blocks of another worker.

    `send`: compute the prompt and keep its blocks for another worker; the output has their `params`, and a token that
    nobody reads. `receive`: read such blocks instead of computing the prompt. `fetch`: only read them, for further
    requests. `release`: they will not be read; no prompt is computed.

    `params` are the connector's, JSON that only the bridge reads; empty if it finds blocks by the prompt.
    """

    step: Literal["send", "receive", "fetch", "release"]
    params: bytes = b""

    def __repr__(self) -> str:
        return f"KvTransfer({self.step}, {len(self.params)} bytes)"


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request for a worker. `sampling_params` are in the engine's encoding; only the bridge reads them. If it
    `is_pooling`, they are pooling parameters, and the output is one tensor. If not `reads_prefix_cache`, the engine
    computes all tokens of the prompt, whatever it has cached.

    `lora` is a LoRA request in the engine's encoding, `lora_name` the adapter's name as clients know it, `adapter` its
    name with its version, as in the engine's KV events; `reasoning` are the reasoning parser's arguments. Outputs are
    deltas, or a single final one; if `cumulative`, each has everything so far. If `has_passed_holds`, the store tells
    the worker that it holds entries that the prompt refers to.

    `generated` are the tokens that the answer has had at an earlier worker: they follow the prompt once that is
    rendered and validated, since a placeholder's id among them is no item, and the output begins behind them.

    With `kv_transfer`, two workers share the work: one computes the prompt, the other one continues it. If that comes
    `without_media`, its features have headers alone, and it fails if an item must be computed: with HandoverFailed, or
    WorkerLost once it has output.
    """

    request_id: str
    prompt: Prompt
    sampling_params: bytes
    prompt_text: str | None = None
    cache_salt: str | None = None
    lora: bytes | None = None
    lora_name: str | None = None
    adapter: str | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning: bytes | None = None
    cumulative: bool = False
    has_passed_holds: bool = False
    without_media: bool = False
    is_pooling: bool = False
    reads_prefix_cache: bool = True
    generated: list[int] = []
    kv_transfer: KvTransfer | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token: id, log probability, rank (1 is best) and text."""

    token_id: int
    logprob: float
    rank: int | None
    decoded_token: str | None


#: Candidates per token position, the sampled token first; None where the engine has none (first prompt token).
Logprobs = list[list[TokenLogprob] | None]


class CompletionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one of the n completions (all tokens for final-only requests)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class EngineTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of one request by the engine's clock, in seconds: in the scheduler's queue, prefill to first token, and
    from then to the output that has these times: zero for the first output of a stream."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class PooledPart(msgspec.Struct, frozen=True):
    """A part of a pooling request's output: the next bytes of a tensor, in order."""

    spec: TensorSpec
    data: memoryview

    def __repr__(self) -> str:
        return f"PooledPart({self.spec}, {len(self.data)} bytes)"


class OutputDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Output of one step of a request. The first one also has the token ids of a prompt that the worker expanded
    (stages `decoded` and `url`), the positions of its items (`placed`), and the hashes of items whose embeddings are
    now in the arena of the worker's host (`embedded`), and of those among them that the engine was to load instead of
    encoding the item (`loaded`), by what the media were copied from another host (`movers`), and how many of the cached
    tokens another worker has computed (`num_transferred_tokens`). The output of a pooling request is split into
    `pooled` parts, one in each delta. `kv_params` are the last output's of a request that sends KV blocks."""

    request_id: str
    completions: list[CompletionDelta]
    finished: bool = False
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    times: EngineTimes | None = None
    placed: tuple[MediaSpan, ...] = ()
    embedded: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    movers: tuple[MoverName, ...] = ()
    pooled: PooledPart | None = None
    num_transferred_tokens: int = 0
    kv_params: bytes = b""

    @property
    def num_own_cached_tokens(self) -> int | None:
        """The tokens that were in the worker's own KV cache; None if it does not report them."""
        return None if self.num_cached_tokens is None else max(0, self.num_cached_tokens - self.num_transferred_tokens)


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Merge successive deltas of one request into an equivalent one, for a slow reader."""
    first, last = deltas[0], deltas[-1]
    by_index: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        for completion in delta.completions:
            by_index.setdefault(completion.index, []).append(completion)
    return msgspec.structs.replace(
        last,
        completions=[_merge_completions(parts) for parts in by_index.values()],
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        times=first.times,
        placed=first.placed,
        embedded=first.embedded,
        loaded=first.loaded,
        movers=first.movers,
        num_transferred_tokens=first.num_transferred_tokens,
    )


def _merge_completions(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[position for positions in logprobs for position in positions] if logprobs else None,
    )


class WorkerLoad(msgspec.Struct, frozen=True):
    """Load of one rank, as reported by its worker."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class EmbeddingCounts(msgspec.Struct, frozen=True):
    """Totals of an engine since its start: embeddings loaded, items encoded, embeddings saved, and embeddings that
    could not be loaded or saved."""

    loaded: int = 0
    encoded: int = 0
    saved: int = 0
    failed: int = 0


class EncoderCard(msgspec.Struct, frozen=True):
    """The encoder of a worker whose embeddings are kept. `digest` covers everything that its output depends on
    besides the feature: weights, dtype, quantization, versions; `widths` are the columns of its output by modality."""

    digest: str
    dtype: Dtype
    widths: dict[str, int]

    def wanted(self, item: MediaPayload) -> WantedEmbedding | None:
        """Return the item's embedding; None if embeddings of such items are not kept."""
        if item.placeholder is None or len(item.header) > MAX_HEADER_BYTES:
            return None
        shape = (item.placeholder.num_embeds, self.widths.get(item.modality, 0))
        if not all(shape):
            return None
        feature = Feature(item.modality, item.mm_hash, item.header, (), item.size)
        key = embedding_key(mm_hash=item.mm_hash, encoder=self.digest)
        return WantedEmbedding(key, feature, TensorSpec(self.dtype, shape))


#: What a worker does: generate; only compute prompts, for the KV caches of workers that generate, or generate, with
#: prompts that others have computed; or only encode media, so that other workers load the embeddings.
WorkerRole = Literal["worker", "prefill", "decode", "encoder"]
#: Whether outputs of the encoder are kept in the arena: on if possible, on or not started, or off.
EncodeCache = Literal["auto", "on", "off"]
ENCODER: Final[WorkerRole] = "encoder"
PREFILL: Final = "prefill"

#: The environment variable with the port by which other engines find KV blocks of one with NIXL (and the next ones, by
#: its ranks).
SIDE_CHANNEL_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"


class ModelCard(msgspec.Struct, frozen=True):
    """Description of a worker's model and engine. `processor` are the settings that must match for features to be
    interchangeable: model, dtype, processor class and backend, device-side normalisation, versions.

    `block_size` is the number of tokens in a block of the prefix cache, 0 if the engine has none.
    `encoder_cache_tokens` is the encoder cache's size in embeddings, `num_kv_blocks` the KV cache's size per rank in
    blocks. Sizes are 0 if the engine does not report them. `max_loras` is 0 if LoRA is disabled, None if not reported.
    `encoder` is None if embeddings are not kept, and `no_embeddings` says why. `tasks` are a pooling model's, by
    vLLM's names. Workers with the same `kv_group` can read each other's KV blocks; it is empty without a connector.
    """

    model: str
    max_model_len: int
    block_size: int
    processor: dict[str, str]
    encoder_cache_tokens: int = 0
    num_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    data_parallel_size: int = 1
    max_loras: int | None = None
    encoder: EncoderCard | None = None
    role: WorkerRole = "worker"
    tasks: tuple[str, ...] = ()
    no_embeddings: str = ""
    kv_group: str = ""


#: What an operator sees of a worker.
WorkerState = Literal["ready", "draining", "stalled", "lost"]
WORKER_STATES: Final = ("ready", "draining", "stalled", "lost")


class Endpoint(msgspec.Struct, frozen=True):
    """A worker, or one of its data-parallel ranks, as seen by the router. `num_in_flight` counts this gateway's
    requests there; with `same_host` it maps our arena, with `can_pull` its host's store may copy from ours; a
    `draining` one only finishes its requests; the engine of a `stalled` one hangs. It is `ready` if it is connected."""

    worker_id: str
    address: str
    ready: bool
    load: WorkerLoad
    num_in_flight: int
    rank: int = 0
    num_ranks: int = 1
    same_host: bool = False
    card: ModelCard | None = None
    draining: bool = False
    can_pull: bool = False
    role: WorkerRole = "worker"
    stalled: bool = False

    @property
    def state(self) -> WorkerState:
        if not self.ready:
            return "lost"
        return "stalled" if self.stalled else "draining" if self.draining else "ready"


class CostParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Estimated cost of a routing choice, in milliseconds. The first seven add up to the time to first token.
    `load` is the copying of embeddings that are in the arena of the gateway's host, instead of `encoder`. `contention`
    is the delay that its work causes for later requests, `eviction` the cost of computing again what is evicted for its
    blocks, beyond what that is at the worker where it is least; `session` is a bonus, so at most zero."""

    prefill: float = 0.0
    encoder: float = 0.0
    load: float = 0.0
    queue: float = 0.0
    running: float = 0.0
    kv_pressure: float = 0.0
    handover: float = 0.0
    contention: float = 0.0
    eviction: float = 0.0
    session: float = 0.0

    @property
    def expected_ms(self) -> float:
        """Expected time to first token."""
        return self.prefill + self.encoder + self.load + self.queue + self.running + self.kv_pressure + self.handover

    @property
    def total(self) -> float:
        """The cost by which choices are compared."""
        return self.expected_ms + self.contention + self.eviction + self.session


class Alternative(msgspec.Struct, frozen=True):
    """A worker that was not chosen: its score under the policy (lower is better) and the prompt tokens in its cache."""

    worker_id: str
    rank: int
    score: float
    cached_tokens: int


class RoutingDecision(msgspec.Struct, frozen=True):
    """The chosen worker and the reason. `cached_tokens` is the predicted number of prompt tokens in its KV cache (whole
    blocks, at most all but the last token); `encoder_items_cached` the number of items that need no encoder run: those
    within the cached tokens, and the items in its encoder cache; `encoder_items_loaded` the number of others whose
    embeddings it loads from the arena. `expected_ms` is the expected time to first token. `alternatives` are the next
    best workers."""

    worker_id: str
    reason: str
    rank: int = 0
    num_ranks: int = 1
    policy: str = "least-loaded"
    num_tokens: int = 0
    cached_tokens: int = 0
    num_items: int = 0
    encoder_items_cached: int = 0
    encoder_items_loaded: int = 0
    expected_ms: float = 0.0
    parts: CostParts = CostParts()
    alternatives: tuple[Alternative, ...] = ()


class RestOfChoice(Protocol):
    """The part of one completion that its worker has not delivered: a request of its own, for one completion.

    Its `sampling_params`, in the engine's encoding, ask for what is left of the original ones, and for no text.
    """

    @property
    def sampling_params(self) -> bytes: ...

    def restore(self, completion: CompletionDelta) -> CompletionDelta:
        """Return what the other worker has sent as the undisturbed answer would have had it: the choice's index, the
        text, the decoded tokens and cumulative log probability. If a stop string is met, the result is the last one and
        says so; the caller aborts the request. To be called for each of its outputs, in order."""
        ...


class Continuable(Protocol):
    """One request's answer, should its worker be lost. Making it costs nothing; using it does."""

    @property
    def obstacle(self) -> str:
        """What of the lost engine's state another worker cannot have, in words for the client ("structured output");
        empty if there is nothing."""
        ...

    @property
    def num_choices(self) -> int:
        """The number of completions that were asked for."""
        ...

    def rest(self, index: int, token_ids: Sequence[int], *, cumulative_logprob: float | None) -> RestOfChoice:
        """Return the rest of the choice with this `index`, of which these tokens, all the text that can be sent of them
        and, if there are log probabilities, their sum were delivered. Takes less than 1 ms, whatever their number."""
        ...
