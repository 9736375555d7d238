"""From a media reference to encoded bytes, and from encoded bytes to decoded pixels, safely.

`Fetcher` and `data_url` get bytes; `sniff` says what they are and whether a decoder may see them; `decode_image` decodes.
Names load when first used: a preparer decodes and needs no HTTP client, and the command line needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medialane.media.config import FetchLimits, MediaConfig
    from medialane.media.data_url import DataUrl, decode_base64, parse_data_url
    from medialane.media.fetch import Fetched, Fetcher
    from medialane.media.image import decode_image
    from medialane.media.sniff import Sniffed, sniff

__all__ = [
    "DataUrl",
    "FetchLimits",
    "Fetched",
    "Fetcher",
    "MediaConfig",
    "Sniffed",
    "decode_base64",
    "decode_image",
    "parse_data_url",
    "sniff",
]

_HOMES = {
    "DataUrl": "data_url",
    "FetchLimits": "config",
    "Fetched": "fetch",
    "Fetcher": "fetch",
    "MediaConfig": "config",
    "Sniffed": "sniff",
    "decode_base64": "data_url",
    "decode_image": "image",
    "parse_data_url": "data_url",
    "sniff": "sniff",
}


def __getattr__(name: str) -> object:
    """Load a name of the door on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
