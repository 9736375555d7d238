"""How the router chooses: the policy, and what things cost."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from medialane.core.errors import StartupFailed

PolicyName = Literal["cost", "round-robin", "random", "least-loaded", "prefix-only"]

_MUST_BE_POSITIVE = ("session_ttl_s", "max_sessions", "soon_ttl_s", "num_decisions", "store_grace_s")


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are expected milliseconds until the first token, and what others lose by them. Only their ratios decide.

    The times are those of a 7B vision-language model on one large GPU. That, of all values tried at 80 % utilisation,
    none does better by much than these defaults, is what `benchmarks/fit_weights.py` shows.
    """

    router: Annotated[
        PolicyName,
        msgspec.Meta(
            description="which worker a request goes to: cost (the earliest first token, by caches and load), "
            "prefix-only (the longest cached prefix), least-loaded, round-robin, random"
        ),
    ] = "cost"
    prefill_ms_per_token: Annotated[
        float, msgspec.Meta(description="cost of a prompt token that is not in the KV cache, ms")
    ] = 0.05
    encoder_ms_per_token: Annotated[
        float, msgspec.Meta(description="cost of an item's token that is in neither cache, besides its prefill, ms")
    ] = 0.03
    request_ms: Annotated[float, msgspec.Meta(description="cost of any request besides its tokens, ms")] = 5.0
    others_weight: Annotated[
        float,
        msgspec.Meta(
            description="how much more a ms of computing counts than a ms of waiting: who computes what another worker "
            "has keeps others waiting; 0 sends a copy of a prompt under way elsewhere at once"
        ),
    ] = 2.0
    running_ms: Annotated[float, msgspec.Meta(description="cost of each sequence that the engine runs already, ms")] = (
        0.2
    )
    seat_ms: Annotated[
        float,
        msgspec.Meta(description="cost of each sequence above what the engine runs at once: it waits for an end, ms"),
    ] = 100.0
    kv_pressure_ms: Annotated[
        float, msgspec.Meta(description="cost of a KV cache that running sequences fill to the brim, ms")
    ] = 200.0
    kv_pressure_from: Annotated[
        float, msgspec.Meta(description="part of the KV cache in use from which on that cost rises from zero")
    ] = 0.8
    local_ms_per_mib: Annotated[
        float, msgspec.Meta(description="cost of handing a MiB to a worker that maps the shared memory, ms")
    ] = 0.02
    remote_ms: Annotated[
        float, msgspec.Meta(description="cost of handing anything to another worker than that, ms")
    ] = 0.5
    remote_ms_per_mib: Annotated[float, msgspec.Meta(description="cost of each MiB of it, ms")] = 1.0
    session_ms: Annotated[
        float, msgspec.Meta(description="what the worker of a session's last request is preferred by, ms")
    ] = 2.0
    session_ttl_s: Annotated[float, msgspec.Meta(description="how long a session without requests is remembered")] = (
        600.0
    )
    max_sessions: Annotated[int, msgspec.Meta(description="sessions that are remembered at once")] = 100_000
    temperature_ms: Annotated[
        float,
        msgspec.Meta(
            description="0 takes the least cost; above, a worker is drawn with weight exp(-cost / temperature), ms"
        ),
    ] = 0.0
    max_in_flight: Annotated[
        int, msgspec.Meta(description="requests of this gateway at one worker at once; 0 is no limit")
    ] = 0
    soon_ttl_s: Annotated[
        float,
        msgspec.Meta(description="how long a prompt counts as cached where it was sent before the worker tells so"),
    ] = 60.0
    store_grace_s: Annotated[
        float,
        msgspec.Meta(description="how long after a first token its prompt's blocks may take to be told by the worker"),
    ] = 10.0
    num_decisions: Annotated[int, msgspec.Meta(description="last choices that can be looked up")] = 256

    def validate(self) -> None:
        """Raise StartupFailed naming the setting that cannot work."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, str) and not value >= 0:
                raise StartupFailed(f"{name} must not be negative")
        for name in _MUST_BE_POSITIVE:
            if not getattr(self, name):
                raise StartupFailed(f"{name} must be positive")
        if self.kv_pressure_from >= 1:
            raise StartupFailed("kv_pressure_from must be below 1")
