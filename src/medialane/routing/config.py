"""Router settings: the policy and the costs that it weighs."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds

PolicyName = Literal["cost", "round-robin", "random", "least-loaded", "prefix-only"]


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Costs are expected milliseconds until the first token, plus the delay of other requests. Only ratios matter.

    The times are of a 7B vision-language model on one large GPU. `benchmarks/fit_weights.py` varies each at
    about 80 % utilisation, with embeddings shared on one host and two, with none, and with scarce engines.
    """

    router: PolicyName = field(default="cost", name="router")
    """cost (lowest expected time to first token, by caches and load), prefix-only (longest cached prefix),
    least-loaded, round-robin, random"""
    prefill_ms_per_token: NonNegativeFloat = field(default=0.05, name="routing-prefill-ms-per-token")
    """cost of a prompt token that is not in the KV cache"""
    encoder_ms_per_token: NonNegativeFloat = field(default=0.03, name="routing-encoder-ms-per-token")
    """cost of encoding one embedding of an uncached item, besides its prefill"""
    transfer_ms_per_token: NonNegativeFloat = field(default=0.003, name="routing-transfer-ms-per-token")
    """cost of reading a token's KV blocks from another worker"""
    split_tokens: NonNegativeInt = field(default=64, name="routing-split-tokens")
    """fewest tokens that the worker must not have cached for another one to compute the prompt"""
    prefill_at: Literal["auto", "prefill", "decode"] = field(default="auto", name="prefill-at")
    """where prompts are computed if there are workers for that (--prefill): prefill (there), decode (where the answer
    is generated), auto (where it delays requests least)"""
    load_ms_per_mib: NonNegativeFloat = field(default=0.1, name="routing-load-ms-per-mib")
    """cost of a MiB of embeddings copied from the arena to the device instead of encoding"""
    request_ms: NonNegativeFloat = field(default=5.0, name="routing-request-ms")
    """cost of any request besides its tokens"""
    contention_weight: NonNegativeFloat = field(default=2.0, name="routing-contention-weight")
    """weight of computing relative to waiting, as recomputing delays others; 0 duplicates a prompt in flight elsewhere
    at once"""
    running_ms: NonNegativeFloat = field(default=0.2, name="routing-running-ms")
    """cost of each running sequence"""
    over_capacity_ms: NonNegativeFloat = field(default=25.0, name="routing-over-capacity-ms")
    """cost of each sequence beyond max_num_seqs"""
    kv_pressure_ms: NonNegativeFloat = field(default=200.0, name="routing-kv-pressure-ms")
    """cost of a KV cache completely filled by running sequences"""
    kv_pressure_threshold: NonNegativeFloat = field(default=0.8, name="routing-kv-pressure-threshold")
    """KV-cache utilisation above which that cost rises linearly from zero"""
    local_ms_per_mib: NonNegativeFloat = field(default=0.02, name="routing-local-ms-per-mib")
    """cost of a MiB handed over to a worker that maps the arena"""
    remote_ms: NonNegativeFloat = field(default=0.5, name="routing-remote-ms")
    """fixed cost of a hand-over to any other worker"""
    remote_ms_per_mib: NonNegativeFloat = field(default=1.0, name="routing-remote-ms-per-mib")
    """cost of each MiB of such a hand-over"""
    session_ms: NonNegativeFloat = field(default=2.0, name="routing-session-ms")
    """bonus of the worker that served the session's last request"""
    session_ttl_s: PositiveFloat = field(default=600.0, name="routing-session-ttl")
    """how long a session without requests is remembered"""
    max_sessions: PositiveInt = field(default=100_000, name="routing-max-sessions")
    """most sessions that are remembered"""
    temperature_ms: NonNegativeFloat = field(default=0.0, name="routing-temperature-ms")
    """0: the lowest cost; otherwise a worker is sampled with weight exp(-cost / temperature)"""
    max_in_flight: NonNegativeInt = field(default=0, name="routing-max-in-flight")
    """most concurrent requests of this gateway at one worker; 0: no limit"""
    pending_ttl_s: PositiveFloat = field(default=60.0, name="routing-pending-ttl")
    """how long a prompt in flight counts as cached without KV events that confirm it"""

    def validate(self) -> None:
        """Raise StartupFailed naming the invalid setting."""
        check_bounds(self)
        if self.kv_pressure_threshold >= 1:
            raise StartupFailed("kv_pressure_threshold must be below 1")
