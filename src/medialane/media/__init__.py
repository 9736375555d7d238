"""Fetching and decoding of untrusted media: from a reference to encoded bytes, and from these to decoded media.

`Fetcher` and `parse_data_url` get bytes; `sniff` detects their type; `decode` decodes, and `probe` opens without
decoding. The fetcher is imported lazily: preparers and the command line need no HTTP client.
"""

from typing import TYPE_CHECKING

from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.data_url import DataUrl, decode_base64, parse_data_url
from medialane.media.decoders import decode, installed_kinds, needs_probe, probe, sniff
from medialane.media.image_header import image_size

if TYPE_CHECKING:
    from medialane.media.fetch import Fetched, Fetcher

__all__ = [
    "DataUrl",
    "FetchLimits",
    "Fetched",
    "Fetcher",
    "MediaConfig",
    "decode",
    "decode_base64",
    "image_size",
    "installed_kinds",
    "needs_probe",
    "parse_data_url",
    "probe",
    "sniff",
]


def __getattr__(name: str) -> object:
    """Import the fetcher on first use (PEP 562)."""
    if name not in ("Fetched", "Fetcher"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medialane.media import fetch

    return getattr(fetch, name)
