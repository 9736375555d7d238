"""Settings of the media store and of its clients."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.setting import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_bounds
from medialane.wire.address import parse_tcp


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_uuids: NonNegativeInt = field(default=100_000, name="store-max-uuids")
    """most media uuids remembered, over all tenants; 0: none"""
    uuid_ttl_s: PositiveFloat = field(default=3600.0, name="store-uuid-ttl")
    """how long a media uuid, and what a feature was made of, is remembered after its last use"""
    media_lease_ttl_s: PositiveFloat = field(default=3600.0, name="media-lease-ttl")
    """how long media sent once (PUT /medialane/v1/media) are kept, by default and at most"""
    media_lease_share: NonNegativeFloat = field(default=0.25, name="media-lease-share")
    """share of the arena's bytes and entries for such media; 0 accepts none"""
    media_lease_tenant_share: PositiveFloat = field(default=0.5, name="media-lease-tenant-share")
    """part of that, and of remembered uuids and features, for one tenant (--keys)"""
    max_connections: PositiveInt = field(default=256, name="store-max-connections")
    """most gateways and workers connected to one store"""
    wait_timeout_s: PositiveFloat = field(default=10.0, name="store-wait-timeout")
    """how long a request waits for a restarting store before it gets 503"""

    hold_retention_s: NonNegativeFloat = field(default=1.0, name="store-hold-retention")
    """how long gateways and workers hold an item after its last use, at most an eighth of the arena each; nothing while
    memory is short"""
    peer_listen: str = field(default="", name="peer-listen")
    """address at which other hosts' stores copy entries from this one: HOST:PORT"""
    peer_streams: PositiveInt = field(default=4, name="peer-streams")
    """most TCP connections to copy one entry from another host, with at least 16 MiB each"""
    nixl: Literal["auto", "on", "off"] = field(default="auto", name="peer-nixl")
    """copy entries between hosts by NIXL, which neither encrypts nor authenticates; auto: with RDMA devices and without
    TLS"""

    debug_holds: bool = field(default=False, name="debug-holds")
    """record who takes each hold in the arena, and where, to find leaks: `medialane status --store` shows the oldest,
    SIGUSR2 logs all"""

    def validate(self) -> None:
        check_bounds(self)
        if self.media_lease_share > 0.5:
            raise StartupFailed("media_lease_share must be at most 0.5: the rest is for what requests need meanwhile")
        if self.media_lease_tenant_share > 1:
            raise StartupFailed("media_lease_tenant_share must be at most 1")
        if self.peer_listen:
            parse_tcp(self.peer_listen, "--peer-listen")
