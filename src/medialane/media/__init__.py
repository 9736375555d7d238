"""Fetching and decoding of untrusted media: from a reference to encoded bytes, and from these to decoded media.

`fetch.Fetcher` gets bytes (not imported here: preparers and the command line need no HTTP client); `sniff` detects
their type; `decode` decodes, and `probe` opens without decoding.
"""

from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.data_url import decode_base64
from medialane.media.decoders import decode, installed_kinds, measure, needs_probe, probe, sniff
from medialane.media.image_header import image_size, sniff_image
from medialane.media.oriented_size import oriented_size

__all__ = [
    "FetchLimits",
    "MediaConfig",
    "decode",
    "decode_base64",
    "image_size",
    "installed_kinds",
    "measure",
    "needs_probe",
    "oriented_size",
    "probe",
    "sniff",
    "sniff_image",
]
