"""Router settings: the policy and the costs that it weighs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from medialane.core.errors import StartupFailed

PolicyName = Literal["cost", "round-robin", "random", "least-loaded", "prefix-only"]

_MUST_BE_POSITIVE = ("session_ttl_s", "max_sessions", "pending_ttl_s", "num_decisions", "store_grace_s")


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are expected milliseconds until the first token, plus the delay of other requests. Only ratios matter.

    The times are those of a 7B vision-language model on one large GPU. `benchmarks/fit_weights.py` shows that at 80 %
    utilisation no other value tried does much better than these defaults.
    """

    router: Annotated[
        PolicyName,
        msgspec.Meta(
            description="routing policy: cost (lowest expected time to first token, by caches and load), "
            "prefix-only (the longest cached prefix), least-loaded, round-robin, random"
        ),
    ] = "cost"
    prefill_ms_per_token: Annotated[
        float, msgspec.Meta(description="cost of a prompt token that is not in the KV cache, ms")
    ] = 0.05
    encoder_ms_per_token: Annotated[
        float,
        msgspec.Meta(
            description="cost of encoding one embedding of an item that is in no cache, besides its prefill, ms"
        ),
    ] = 0.03
    request_ms: Annotated[float, msgspec.Meta(description="cost of any request besides its tokens, ms")] = 5.0
    contention_weight: Annotated[
        float,
        msgspec.Meta(
            description="weight of a ms of computing relative to a ms of waiting: computing what another worker "
            "has cached delays other requests; 0 duplicates a prompt that is in flight elsewhere at once"
        ),
    ] = 2.0
    running_ms: Annotated[float, msgspec.Meta(description="cost of each running sequence, ms")] = 0.2
    over_capacity_ms: Annotated[
        float,
        msgspec.Meta(description="cost of each sequence beyond max_num_seqs, which waits for another to finish, ms"),
    ] = 100.0
    kv_pressure_ms: Annotated[
        float, msgspec.Meta(description="cost of a KV cache completely filled by running sequences, ms")
    ] = 200.0
    kv_pressure_threshold: Annotated[
        float, msgspec.Meta(description="KV-cache utilisation above which that cost rises linearly from zero")
    ] = 0.8
    local_ms_per_mib: Annotated[
        float, msgspec.Meta(description="cost of a MiB transferred to a worker that maps the shared memory, ms")
    ] = 0.02
    remote_ms: Annotated[float, msgspec.Meta(description="fixed cost of a transfer to any other worker, ms")] = 0.5
    remote_ms_per_mib: Annotated[float, msgspec.Meta(description="cost of each MiB of such a transfer, ms")] = 1.0
    session_ms: Annotated[
        float,
        msgspec.Meta(description="bonus of the worker that served the session's last request, ms"),
    ] = 2.0
    session_ttl_s: Annotated[float, msgspec.Meta(description="how long a session without requests is remembered")] = (
        600.0
    )
    max_sessions: Annotated[int, msgspec.Meta(description="most sessions that are remembered")] = 100_000
    temperature_ms: Annotated[
        float,
        msgspec.Meta(
            description="0 selects the lowest cost; else a worker is sampled with weight exp(-cost / temperature), ms"
        ),
    ] = 0.0
    max_in_flight: Annotated[
        int, msgspec.Meta(description="most concurrent requests of this gateway at one worker; 0 disables the limit")
    ] = 0
    pending_ttl_s: Annotated[
        float,
        msgspec.Meta(
            description="how long a prompt in flight counts as cached at its worker without KV events that confirm it"
        ),
    ] = 60.0
    store_grace_s: Annotated[
        float,
        msgspec.Meta(description="how long after the first token the KV events of a prompt may arrive"),
    ] = 10.0
    num_decisions: Annotated[
        int, msgspec.Meta(description="routing decisions that are kept for /medialane/decisions")
    ] = 256

    def validate(self) -> None:
        """Raise StartupFailed naming the invalid setting."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, str) and not value >= 0:
                raise StartupFailed(f"{name} must not be negative")
        for name in _MUST_BE_POSITIVE:
            if not getattr(self, name):
                raise StartupFailed(f"{name} must be positive")
        if self.kv_pressure_threshold >= 1:
            raise StartupFailed("kv_pressure_threshold must be below 1")
