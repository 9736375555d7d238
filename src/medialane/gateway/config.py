"""Settings of the gateway."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.feature import MoverChoice, MoverName
from medialane.types.media import StageChoice
from medialane.types.setting import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretText,
    SecretTexts,
    check_bounds,
    hidden,
)
from medialane.wire.address import parse_tcp

#: The values of --transport.
TransportChoice = Literal["auto", "shm", "inline", MoverName]


class GatewayConfig(msgspec.Struct, frozen=True):
    api_keys: SecretTexts = field(default=(), name="api-keys")
    """keys for clients: A,B,... or a JSON list; VLLM_API_KEY is one key; vLLM's --api-key has precedence"""
    keys: str = field(default="", name="keys")
    """file with tenants' keys, instead of --api-key: a JSON line each, with name, SHA-256 of the key, and limits; read
    again when it changes"""
    require_api_key: bool = field(default=False, name="require-api-key")
    """refuse to start without an API key"""
    stage: StageChoice = field(default="auto", name="stage")
    """what workers get: features (processed tensors), decoded (to be processed by the worker), url (also decoded by
    it), auto (features; decoded if its processor differs; url if the hand-over fails)"""
    render_only: bool = field(default=False, name="render-only")
    """serve calls that need no engine, without workers (`medialane render`); items have plain vLLM's hashes"""
    render_payload: Literal["auto", "tensors", "none", "references"] = field(default="auto", name="render-payload")
    """media items in answers of render endpoints without `mm_payload`: tensors (as vLLM), none, references (to
    features, for later requests), auto (none with --render-only, otherwise tensors)"""
    encode_at: Literal["auto", "encoders", "workers"] = field(default="auto", name="encode-at")
    """where new media are encoded: encoders, workers (each request's own), auto (where it delays requests least)"""
    encode_timeout_s: PositiveFloat = field(default=2.0, name="gateway-encode-timeout")
    """longest wait for an encoder; then the request's worker encodes"""
    max_requests: PositiveInt = field(default=1024, name="gateway-max-requests")
    """most concurrent requests with media, over all gateways of a port; more get 503"""
    tenant_share: PositiveFloat = field(default=0.5, name="gateway-tenant-share")
    """share of --gateway-max-requests and --gateway-max-bodies-bytes for one tenant (--keys); more gets 429"""
    ttft_limit_s: NonNegativeFloat = field(default=0.0, name="gateway-ttft-limit")
    """refuse requests whose first token is expected later than this after their body has arrived; 0: none"""
    trust_headers: bool = field(default=False, name="trust-headers")
    """accept a request's own limit from its header x-llm-d-slo-ttft-ms: only behind a proxy that sets or removes it"""
    queue_requests: NonNegativeInt = field(default=2048, name="gateway-queue-requests")
    """most requests that wait in the gateways of a port for an engine or a preparer; 0: all wait at the engines, none
    is refused"""
    queue_bytes: PositiveInt = field(default=512 << 20, name="gateway-queue-bytes")
    """most bytes of the bodies of waiting requests"""
    queue_timeout_s: PositiveFloat = field(default=30.0, name="gateway-queue-timeout")
    """longest wait in that queue; a request that exceeds it, or would, gets 503"""
    share_cache: bool = field(default=False, name="share-cache")
    """one cache for all keys: response times and cached counts then reveal what others have sent; no: one per tenant or
    key"""
    require_salt: bool = field(default=False, name="require-salt")
    """refuse requests with media but without cache_salt, for several tenants with one API key"""
    max_text_bytes: PositiveInt = field(default=4 << 20, name="gateway-max-text-bytes")
    """largest request body without its media (--media-max-body-bytes: with them)"""
    token_cache_bytes: NonNegativeInt = field(default=64 << 20, name="gateway-token-cache-bytes")
    """most memory for tokens of earlier prompts, over all gateways of a port; 0: each turn of a chat is tokenized from
    its start"""
    max_body_values: PositiveInt = field(default=20_000, name="gateway-max-body-values")
    """most JSON values in a request body, without token ids of a prompt"""
    max_body_depth: PositiveInt = field(default=100, name="gateway-max-body-depth")
    """deepest nesting of a request body's JSON"""
    max_messages: PositiveInt = field(default=2000, name="gateway-max-messages")
    """most messages in a request, content parts included"""
    max_tools: PositiveInt = field(default=256, name="gateway-max-tools")
    """most tools in a request"""
    max_prompts: PositiveInt = field(default=1024, name="gateway-max-prompts")
    """most prompts, batched conversations or items to score in a request"""
    max_token_ids: PositiveInt = field(default=1 << 17, name="gateway-max-token-ids")
    """most token ids in a request whose prompts are token ids"""
    max_bodies_bytes: PositiveInt = field(default=2 << 30, name="gateway-max-bodies-bytes")
    """most memory for request bodies and their media, over all gateways of a port; more get 503"""
    body_timeout_s: PositiveFloat = field(default=300.0, name="gateway-body-timeout")
    """longest time to receive a body or send tensors; a client that reads nothing for this time is disconnected"""
    min_body_rate_bytes_per_s: NonNegativeFloat = field(default=10_000.0, name="gateway-min-body-rate-bytes-per-s")
    """slower bodies get 408, slower readers of tensors are disconnected; 0: no limit"""
    min_body_rate_grace_s: NonNegativeFloat = field(default=10.0, name="gateway-min-body-rate-grace")
    """time before that applies"""
    max_header_bytes: PositiveInt = field(default=64 << 10, name="gateway-max-header-bytes")
    """largest request header, including the request line; more gets 431"""
    header_timeout_s: PositiveFloat = field(default=20.0, name="gateway-header-timeout")
    """longest time for a TLS handshake, and for a request header"""
    max_connections: PositiveInt = field(default=4096, name="gateway-max-connections")
    """most HTTP connections of each gateway, fewer if the limit of open files is lower; more get 503"""
    reconnect_initial_s: float = field(default=0.2, name="gateway-reconnect-initial")
    """first delay before reconnecting to a worker"""
    reconnect_max_s: float = field(default=2.0, name="gateway-reconnect-max")
    """longest delay before reconnecting to a worker"""
    join_listen: str = field(default="", name="join-listen")
    """address at which workers join (`medialane worker --join`): HOST:PORT; further gateways of a host use the next
    ports"""
    forget_worker_s: NonNegativeFloat = field(default=60.0, name="gateway-forget-worker")
    """how long a lost worker that had joined is still reported"""
    max_joined_workers: PositiveInt = field(default=4096, name="gateway-max-joined-workers")
    """most joined workers, reported lost ones included; more are refused"""
    migration_limit: NonNegativeInt = field(default=3, name="migration-limit")
    """how often a request moves to another worker when its own is lost, stalled or draining; 0: it ends with an
    error"""
    migration_timeout_s: NonNegativeFloat = field(default=10.0, name="migration-timeout")
    """how long a request of a lost worker waits for another"""
    admin_timeout_s: PositiveFloat = field(default=300.0, name="gateway-admin-timeout")
    """timeout of an administrative call at a worker"""
    page: bool = field(default=True, name="page")
    """serve the page at /medialane/ and its data (all clients' requests), for the admin key, or this machine if there
    is none"""
    admin_key_file: str = field(default="", name="admin-key-file")
    """file with keys, one per line (or MEDIALANE_ADMIN_KEY), for administrative calls and others' requests; accepted
    everywhere"""
    admin_key: SecretText = field(default="", name="admin-key")
    """the admin key itself, instead of its file"""
    metrics_key_file: str = field(default="", name="metrics-key-file")
    """file with keys, one per line (or MEDIALANE_METRICS_KEY), that /metrics needs; none: anyone can read it"""
    metrics_key: SecretText = field(default="", name="metrics-key")
    """the metrics key itself, instead of its file"""

    def body_seconds(self, num_bytes: int) -> float:
        """Return how many seconds a client may take for this part of a body."""
        if not self.min_body_rate_bytes_per_s:
            return self.body_timeout_s
        by_rate = self.min_body_rate_grace_s + num_bytes / self.min_body_rate_bytes_per_s
        return min(self.body_timeout_s, by_rate)

    @property
    def default_payload(self) -> Literal["tensors", "none", "references"]:
        """`render_payload` of this server."""
        if self.render_payload == "auto":
            return "none" if self.render_only else "tensors"
        return self.render_payload

    def share(self, num_gateways: int, *, max_body_bytes: int) -> GatewayConfig:
        """Return the settings of one of several gateways of a port, with its share of the host's limits; a body of
        `max_body_bytes` is within them."""
        return msgspec.structs.replace(
            self,
            max_requests=-(-self.max_requests // num_gateways),
            token_cache_bytes=self.token_cache_bytes // num_gateways,
            max_bodies_bytes=max(-(-self.max_bodies_bytes // num_gateways), min(max_body_bytes, self.max_bodies_bytes)),
        )

    def validate(self) -> None:
        check_bounds(self)
        if self.tenant_share > 1:
            raise StartupFailed("gateway_tenant_share must be at most 1")
        if not self.queue_requests and (self.ttft_limit_s or self.trust_headers):
            raise StartupFailed("gateway_ttft_limit and trust_headers need a queue: gateway_queue_requests above 0")
        if not 0 < self.reconnect_initial_s <= self.reconnect_max_s:
            raise StartupFailed("reconnect_initial_s must be positive and at most reconnect_max_s")
        if self.join_listen:
            parse_tcp(self.join_listen, "--join-listen")

    def __repr__(self) -> str:
        return super(GatewayConfig, hidden(self)).__repr__()


class HandoverConfig(msgspec.Struct, frozen=True):
    """Settings of the hand-over to workers."""

    transport: TransportChoice = field(default="auto", name="transport")
    """how features are sent: shm (shared memory, same host), tcp or nixl (copied by the store of the worker's host),
    inline (in the message), auto (the first of these that works)"""
    max_inline_bytes: NonNegativeInt = field(default=48 << 20, name="transfer-max-inline-bytes")
    """most tensor bytes of one request that are sent inline"""

    @property
    def mover(self) -> MoverChoice:
        """The mover of entries that are copied by stores."""
        return self.transport if self.transport in ("tcp", "nixl") else "auto"

    def validate(self) -> None:
        check_bounds(self)


class RecordingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the recording of traffic."""

    file: str = field(default="", name="record")
    """append ended requests to this file, for `medialane compare`; FILE.key has the key of its hashes"""
    share: PositiveFloat = field(default=1.0, name="record-share")
    """part of the conversations that is recorded (whole ones), such as 0.01"""
    media: Literal["hash", "whole"] = field(default="hash", name="record-media")
    """hash: a keyed hash and the size; whole: media of bodies and URLs (without URLs that have a query or a
    password)"""
    redact: Literal["none", "text"] = field(default="none", name="record-redact")
    """what is replaced: nothing, or text and tool arguments (by words of the same length, equal beginnings by equal
    ones), and names of users"""
    max_bytes: PositiveInt = field(default=1 << 30, name="record-max-bytes")
    """size of the file at which recording ends"""

    def validate(self) -> None:
        check_bounds(self)
        if self.share > 1:
            raise StartupFailed("share must be at most 1")
