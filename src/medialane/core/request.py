"""A request on its way to an engine, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medialane.core.feature import MediaPayload, MediaSpan
from medialane.core.stage import STAGES, StageName, TransportName


class ExpandedPrompt(msgspec.Struct, frozen=True, tag="expanded"):
    """Of a stage that `is_processed`: expanded token ids and features, each with its placeholder; without features, a
    text prompt.

    `options` are the request's processor options, canonical JSON: the worker needs them to check the placeholders.
    """

    token_ids: list[int]
    features: tuple[MediaPayload, ...] = ()
    options: bytes = b"{}"

    @property
    def media(self) -> tuple[MediaPayload, ...]:
        return self.features

    def __repr__(self) -> str:
        return f"ExpandedPrompt({len(self.token_ids)} tokens, {len(self.features)} features)"


class SourcePrompt(msgspec.Struct, frozen=True, tag="source"):
    """Of the other stages: token ids whose placeholders are not expanded, and the items that the worker shall process
    itself, in the order of their modality.

    `options` are the request's processor options, canonical JSON.
    """

    token_ids: list[int]
    media: tuple[MediaPayload, ...]
    options: bytes = b"{}"
    stage: StageName = "url"

    def __post_init__(self) -> None:
        if STAGES[self.stage].is_processed:
            raise ValueError(f"a prompt of stage {self.stage} is expanded")

    def __repr__(self) -> str:
        return f"SourcePrompt({len(self.token_ids)} tokens, {len(self.media)} items {self.stage})"


Prompt = ExpandedPrompt | SourcePrompt


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker generates from. `sampling_params` is the engine's own encoding; only the bridge reads it.

    `lora` is the engine's own encoding of a LoRA request, `lora_name` the adapter's name in it; `reasoning` are its
    reasoning-parser arguments. Outputs are deltas, or one at the end, unless `cumulative`: then each has all so far.
    """

    request_id: str
    prompt: Prompt
    sampling_params: bytes
    prompt_text: str | None = None
    cache_salt: str | None = None
    lora: bytes | None = None
    lora_name: str | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning: bytes | None = None
    cumulative: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token: id, log probability, rank (1 is best), its text."""

    token_id: int
    logprob: float
    rank: int | None
    decoded_token: str | None


#: Per token position the candidates, the sampled token first; None where the engine gives none (first prompt token).
Logprobs = list[list[TokenLogprob] | None]


class CompletionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one of the n completions gained (or, for final-only requests, all of it)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class EngineTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine's own clock for one request, seconds: waiting for the scheduler, prefill until the first token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0


class OutputDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a request's answer. With the first one come the token ids of a prompt that the worker expanded
    itself (stages `decoded` and `url`), and `placed`: where its items stand."""

    request_id: str
    completions: list[CompletionDelta]
    finished: bool = False
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    times: EngineTimes | None = None
    placed: tuple[MediaSpan, ...] = ()


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Successive deltas of one request as one that says the same: what a slow reader gets in one piece."""
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
    """How busy a worker is, as it reports itself."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class ModelCard(msgspec.Struct, frozen=True):
    """What a worker serves. `processor` are the settings that must agree for features to mean the same:
    model, dtype, processor class and backend, device-side normalisation, versions.

    Sizes are 0 where the engine does not tell: `encoder_cache_tokens` embeddings fit in its encoder cache,
    `num_kv_blocks` blocks in the KV cache of one rank. `max_loras` is 0 where LoRA is off, None where not told.
    """

    model: str
    max_model_len: int
    block_size: int
    mm_limits: dict[str, int]
    processor: dict[str, str]
    encoder_cache_tokens: int = 0
    num_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    data_parallel_size: int = 1
    max_loras: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """A worker, or one data-parallel rank of it, as the router sees it. `num_in_flight` counts this gateway's requests
    there; `same_host` says that it maps our arena; a draining one finishes what it has."""

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


class CostParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a choice costs, in milliseconds. The first six are expected until the first token. `contention` is what its
    work takes from those who come after it; `session` a bonus, so not above zero."""

    prefill: float = 0.0
    encoder: float = 0.0
    queue: float = 0.0
    running: float = 0.0
    kv_pressure: float = 0.0
    handover: float = 0.0
    contention: float = 0.0
    session: float = 0.0

    @property
    def expected_ms(self) -> float:
        """Until the first token."""
        return self.prefill + self.encoder + self.queue + self.running + self.kv_pressure + self.handover

    @property
    def total(self) -> float:
        """What choices are compared by."""
        return self.expected_ms + self.contention + self.session


class Alternative(msgspec.Struct, frozen=True):
    """A worker that was not chosen: what the policy gave it (lower is better), and what it holds of the prompt."""

    worker_id: str
    rank: int
    score: float
    cached_tokens: int


class RoutingDecision(msgspec.Struct, frozen=True):
    """The chosen worker and why. `cached_tokens` are those of the prompt that its engine is predicted to have in its KV
    cache (whole blocks, at most all but the last token); `encoder_items_cached` the items that the encoder need not run
    for: those within the cached tokens, and those in its encoder cache. `expected_ms` is the time until the first
    token. `alternatives` are the next best few."""

    worker_id: str
    reason: str
    rank: int = 0
    num_ranks: int = 1
    policy: str = "least-loaded"
    num_tokens: int = 0
    cached_tokens: int = 0
    num_items: int = 0
    encoder_items_cached: int = 0
    expected_ms: float = 0.0
    parts: CostParts = CostParts()
    alternatives: tuple[Alternative, ...] = ()


__all__ = [
    "Alternative",
    "CompletionDelta",
    "CostParts",
    "Endpoint",
    "EngineRequest",
    "EngineTimes",
    "ExpandedPrompt",
    "Logprobs",
    "ModelCard",
    "OutputDelta",
    "Prompt",
    "RoutingDecision",
    "SourcePrompt",
    "TokenLogprob",
    "TransportName",
    "WorkerLoad",
    "merge_deltas",
]
