"""Administrative calls that an operator sends to every worker's engine.

They mirror vLLM's (`vllm.engine.protocol.EngineClient`). Only these types can be sent: an engine handles each type
explicitly, so a peer cannot call an arbitrary method by name.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

import msgspec

PauseMode = Literal["abort", "wait", "keep"]


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result is False while blocks are in use."""

    reset_running_requests: bool = False
    reset_connector: bool = False


class ResetMmCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ResetEncoderCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`salt` is as in `Sleep`."""

    salt: str = ""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`salt` becomes part of the encoder's digest if the call `changes_encoder`: it is the same for all workers, which
    then still have equal digests."""

    level: int = 1
    mode: PauseMode = "abort"
    salt: str = ""


class ReleaseKvCacheMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result is whether the engine is fully awake."""

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
    """`lora` is a LoRA request in the engine's encoding, whose files are loaded as they are now. The result is
    their version: requests name it (`EngineRequest.adapter`)."""

    lora: bytes


class UnloadLora(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Unloads all versions of the adapter `name` but `keep`, if in use once their requests have ended."""

    name: str
    keep: str = ""


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
    | UnloadLora
)

#: The result of a call: a boolean, or the version of an adapter, for calls that return one, otherwise None.
AdminResult = bool | Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] | None


def changes_encoder(call: AdminCall) -> TypeGuard[ResetEncoderCache | Sleep]:
    """Return whether the call is one with which an operator changes weights: vLLM discards them (sleep level 2), or its
    own embeddings."""
    return isinstance(call, ResetEncoderCache) or (isinstance(call, Sleep) and call.level >= 2)


def concerns_encoders(call: AdminCall) -> bool:
    """Return whether the call also goes to workers that only encode. They have neither KV cache nor adapters, and
    pausing generation does not pause them."""
    return isinstance(call, ResetMmCache | ResetEncoderCache | Sleep | WakeUp | StartProfile | StopProfile)


def clears_kv_cache(call: AdminCall) -> bool:
    """Return whether the call leaves the engine's KV cache empty."""
    return isinstance(call, ResetPrefixCache) or _clears_all(call)


def clears_encoder_cache(call: AdminCall) -> bool:
    """Return whether the call leaves the engine's encoder cache empty."""
    return isinstance(call, ResetEncoderCache) or _clears_all(call)


def _clears_all(call: AdminCall) -> bool:
    match call:
        case Sleep():
            return call.level >= 1
        case PauseGeneration():
            return call.clear_cache and call.mode != "keep"
        case _:
            return isinstance(call, ReleaseKvCacheMemory)
