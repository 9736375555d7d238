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
    """most media uuids that are remembered, over all tenants; 0 disables them"""
    uuid_ttl_s: PositiveFloat = field(default=3600.0, name="store-uuid-ttl")
    """how long a media uuid, and what a feature was made of, is remembered after its last use"""
    media_lease_ttl_s: PositiveFloat = field(default=3600.0, name="media-lease-ttl")
    """how long media that a client has sent once (PUT /medialane/v1/media) are kept, at most and by default"""
    media_lease_share: NonNegativeFloat = field(default=0.25, name="media-lease-share")
    """share of the shared memory, and of the entries in it, that such media may have; 0 accepts none"""
    media_lease_tenant_share: PositiveFloat = field(default=0.5, name="media-lease-tenant-share")
    """share of that which those of one tenant (--keys) may have, and of the uuids and features that are remembered"""
    max_connections: PositiveInt = field(default=256, name="store-max-connections")
    """most gateways and workers connected to one store"""
    wait_timeout_s: PositiveFloat = field(default=10.0, name="store-wait-timeout")
    """how long a request waits for a store that is restarting before it gets 503"""

    hold_retention_s: NonNegativeFloat = field(default=1.0, name="store-hold-retention")
    """how long gateways and workers hold an item after its last use, so that using it again needs no message to the
    store; 0 disables it. At most an eighth of the arena each, and nothing while memory is short"""
    peer_listen: str = field(default="", name="peer-listen")
    """address at which other hosts' stores copy entries from this one: HOST:PORT, one of this host that they can
    connect to; none by default"""
    peer_streams: PositiveInt = field(default=4, name="peer-streams")
    """most TCP connections over which one entry is copied from another host, with at least 16 MiB each"""
    nixl: Literal["auto", "on", "off"] = field(default="auto", name="peer-nixl")
    """whether entries may be copied between hosts by NIXL, which neither encrypts nor authenticates: auto (if the host
    has RDMA devices and TLS is not configured), on, off"""

    debug_holds: bool = field(default=False, name="debug-holds")
    """record who takes each hold on media in shared memory, and where, for finding leaks, at some
    microseconds for each: `medialane status --store` shows the oldest, the store logs all on SIGUSR2"""

    def validate(self) -> None:
        check_bounds(self)
        if self.media_lease_share > 0.5:
            raise StartupFailed("media_lease_share must be at most 0.5: the rest is for what requests need meanwhile")
        if self.media_lease_tenant_share > 1:
            raise StartupFailed("media_lease_tenant_share must be at most 1")
        if self.peer_listen:
            parse_tcp(self.peer_listen, "--peer-listen")
