"""Administrative calls: what an operator asks of every worker's engine, beside requests.

They are vLLM's own (`vllm.engine.protocol.EngineClient`), and these are all that may travel: an engine has a method for
each type, and nothing is called by a name that somebody sent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered False while blocks are in use."""

    reset_running_requests: bool = False
    reset_connector: bool = False


class ResetMmCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ResetEncoderCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    level: int = 1
    mode: PauseMode = "abort"


class ReleaseKvCacheMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered whether the engine is fully awake."""

    tags: tuple[str, ...] | None = None


class IsSleeping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class PauseGeneration(msgspec.Struct, frozen=True, array_like=True, tag=True):
    mode: PauseMode = "abort"
    clear_cache: bool = True


class ResumeGeneration(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class IsPaused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AddLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`lora` is the engine's own encoding of a LoRA request, as in `EngineRequest`."""

    lora: bytes


AdminCall = (
    ResetPrefixCache
    | ResetMmCache
    | ResetEncoderCache
    | Sleep
    | ReleaseKvCacheMemory
    | WakeUp
    | IsSleeping
    | PauseGeneration
    | ResumeGeneration
    | IsPaused
    | StartProfile
    | StopProfile
    | AddLora
)

#: What an engine answers: a yes or no for the calls that ask for one.
AdminResult = bool | None


def clears_kv_cache(call: AdminCall) -> bool:
    """Whether an engine that has done the call holds no KV blocks any more."""
    return isinstance(call, ResetPrefixCache) or _clears_all(call)


def clears_encoder_cache(call: AdminCall) -> bool:
    """Whether an engine that has done the call holds no encoder outputs any more."""
    return isinstance(call, ResetEncoderCache) or _clears_all(call)


def _clears_all(call: AdminCall) -> bool:
    match call:
        case Sleep():
            return call.level >= 1
        case PauseGeneration():
            return call.clear_cache and call.mode != "keep"
        case _:
            return isinstance(call, ReleaseKvCacheMemory)
