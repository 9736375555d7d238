"""A request on its way to an engine, and what comes back."""

from __future__ import annotations

from typing import Literal

import msgspec

from medialane.core.feature import HandedMedia

Stage = Literal["features", "decoded", "url"]
TransportName = Literal["shm", "inline"]


class ExpandedPrompt(msgspec.Struct, frozen=True, tag="expanded"):
    """Stage `features`: expanded token ids and features, each with its placeholder; without features, a text prompt.

    `options` are the request's processor options, canonical JSON: the worker needs them to check the placeholders.
    """

    token_ids: list[int]
    features: tuple[HandedMedia, ...] = ()
    options: bytes = b"{}"

    @property
    def media(self) -> tuple[HandedMedia, ...]:
        return self.features

    def __repr__(self) -> str:
        return f"ExpandedPrompt({len(self.token_ids)} tokens, {len(self.features)} features)"


class SourcePrompt(msgspec.Struct, frozen=True, tag="source"):
    """Stages `decoded` and `url`: token ids whose placeholders are not expanded, and the items that the worker shall
    process itself, in the order of their modality.

    `options` are the request's processor options, canonical JSON.
    """

    token_ids: list[int]
    media: tuple[HandedMedia, ...]
    options: bytes = b"{}"
    stage: Literal["decoded", "url"] = "url"

    def __repr__(self) -> str:
        return f"SourcePrompt({len(self.token_ids)} tokens, {len(self.media)} items {self.stage})"


Prompt = ExpandedPrompt | SourcePrompt


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker generates from. `sampling_params` is the engine's own encoding; only the bridge reads it.

    `lora` is the engine's own encoding of a LoRA request, `reasoning` of its reasoning-parser arguments.
    """

    request_id: str
    prompt: Prompt
    sampling_params: bytes
    prompt_text: str | None = None
    cache_salt: str | None = None
    lora: bytes | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning: bytes | None = None


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
    """One step of a request's answer. The prompt's token ids come with the first one only."""

    request_id: str
    completions: list[CompletionDelta]
    finished: bool = False
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    times: EngineTimes | None = None


class WorkerLoad(msgspec.Struct, frozen=True):
    """How busy a worker is, as it reports itself."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


class ModelCard(msgspec.Struct, frozen=True):
    """What a worker serves. `processor` are the settings that must agree for features to mean the same:
    model, dtype, processor class and backend, device-side normalisation, versions."""

    model: str
    max_model_len: int
    block_size: int
    mm_limits: dict[str, int]
    processor: dict[str, str]
    supported_tasks: tuple[str, ...] = ("generate",)


class Endpoint(msgspec.Struct, frozen=True):
    """A worker as the router sees it. `num_in_flight` counts this gateway's requests there."""

    worker_id: str
    address: str
    ready: bool
    load: WorkerLoad
    num_in_flight: int


class RoutingDecision(msgspec.Struct, frozen=True):
    """The chosen worker, and the score of every candidate (lower is better)."""

    worker_id: str
    scores: dict[str, float]
    reason: str


__all__ = [
    "CompletionDelta",
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
    "Stage",
    "TokenLogprob",
    "TransportName",
    "WorkerLoad",
]
