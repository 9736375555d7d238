"""The media store of one host: a process that fetches, decodes and processes media once for all gateways there.

It owns the arena, the cached encoded bytes, the preparers and the clients' names of media. Gateways find items and
workers hold what they read, over a unix socket (`messages`); tensors stay in shared memory.
"""

from medialane.store.aliases import Aliases
from medialane.store.config import StoreConfig
from medialane.store.encoded_store import EncodedStore
from medialane.store.hold_passing import HoldPasser
from medialane.store.holds import StoreEntries, StoreGrants
from medialane.store.items import Items
from medialane.store.link import StoreLink
from medialane.store.media_leases import MediaLeases
from medialane.store.published_images import PublishedImages
from medialane.store.server import StoreServer

__all__ = [
    "Aliases",
    "EncodedStore",
    "HoldPasser",
    "Items",
    "MediaLeases",
    "PublishedImages",
    "StoreConfig",
    "StoreEntries",
    "StoreGrants",
    "StoreLink",
    "StoreServer",
]
