"""The media store of one host: a process that fetches, decodes and processes media once for all gateways there.

It owns the arena, the cached encoded bytes, the preparers and the clients' names of media. Gateways find items and
workers hold what they read, over a unix socket (`messages`); tensors stay in shared memory.
"""

from medialane.store.client import ConnectionLost, StoreClient, StoreLink
from medialane.store.config import StoreConfig
from medialane.store.encoded_store import EncodedStore
from medialane.store.holds import HoldCache, HoldPasser, StoreEntries, StoreGrants, StoreHold
from medialane.store.items import Items, LeasedItem, Processing
from medialane.store.media_leases import MAX_LEASES, MediaLeases
from medialane.store.messages import (
    MAX_UPLOAD_S,
    AliasResolved,
    AskLease,
    Call,
    DescribeItem,
    FindEmbedding,
    FindFeature,
    FindItem,
    Form,
    HeldEntry,
    ImagePublished,
    ImageSize,
    ItemDescribed,
    ItemFound,
    MediaLeased,
    PublishImage,
    PutFeature,
    PutMedia,
    Question,
    Reply,
    ResolveAlias,
    SendData,
    StoreHello,
    StoreStatus,
)
from medialane.store.names import Aliases, AliasTarget, FeatureSource, KnownFeatures
from medialane.store.published_images import PublishedImages
from medialane.store.server import StoreServer

__all__ = [
    "MAX_LEASES",
    "MAX_UPLOAD_S",
    "AliasResolved",
    "AliasTarget",
    "Aliases",
    "AskLease",
    "Call",
    "ConnectionLost",
    "DescribeItem",
    "EncodedStore",
    "FeatureSource",
    "FindEmbedding",
    "FindFeature",
    "FindItem",
    "Form",
    "HeldEntry",
    "HoldCache",
    "HoldPasser",
    "ImagePublished",
    "ImageSize",
    "ItemDescribed",
    "ItemFound",
    "Items",
    "KnownFeatures",
    "LeasedItem",
    "MediaLeased",
    "MediaLeases",
    "Processing",
    "PublishImage",
    "PublishedImages",
    "PutFeature",
    "PutMedia",
    "Question",
    "Reply",
    "ResolveAlias",
    "SendData",
    "StoreClient",
    "StoreConfig",
    "StoreEntries",
    "StoreGrants",
    "StoreHello",
    "StoreHold",
    "StoreLink",
    "StoreServer",
    "StoreStatus",
]
