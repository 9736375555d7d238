"""The media store of one host: a process that fetches, decodes and processes media once for all gateways there.

It owns the arena, the cached encoded bytes, the preparers and the clients' names of media. Gateways find items and
workers hold what they read, over a unix socket (`messages`); tensors stay in shared memory.
"""

from medialane.store.client import ConnectionLost, StoreClient, StoreLink
from medialane.store.config import StoreConfig
from medialane.store.encoded_store import EncodedStore
from medialane.store.holds import HoldPasser, StoreEntries, StoreGrants
from medialane.store.items import Items, ItemSource, PinnedItem, Processing
from medialane.store.media_leases import MediaLeases
from medialane.store.messages import (
    AliasResolved,
    AskLease,
    DescribeItem,
    FindEmbedding,
    FindItem,
    HeldEntry,
    ImageSize,
    ItemDescribed,
    ItemFound,
    PutMedia,
    ResolveAlias,
    SendData,
    StoreHello,
    StoreStatus,
)
from medialane.store.names import Aliases, AliasTarget, FeatureSource, KnownFeatures
from medialane.store.published_images import PublishedImages
from medialane.store.server import StoreServer

__all__ = [
    "AliasResolved",
    "AliasTarget",
    "Aliases",
    "AskLease",
    "ConnectionLost",
    "DescribeItem",
    "EncodedStore",
    "FeatureSource",
    "FindEmbedding",
    "FindItem",
    "HeldEntry",
    "HoldPasser",
    "ImageSize",
    "ItemDescribed",
    "ItemFound",
    "ItemSource",
    "Items",
    "KnownFeatures",
    "MediaLeases",
    "PinnedItem",
    "Processing",
    "PublishedImages",
    "PutMedia",
    "ResolveAlias",
    "SendData",
    "StoreClient",
    "StoreConfig",
    "StoreEntries",
    "StoreGrants",
    "StoreHello",
    "StoreLink",
    "StoreServer",
    "StoreStatus",
]
