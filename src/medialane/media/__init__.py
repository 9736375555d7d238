"""Fetching and decoding of untrusted media: from a reference to encoded bytes, and from these to decoded media.

`fetch.Fetcher` gets bytes (not imported here: preparers and the command line need no HTTP client); `sniff` detects
their type; `decode` decodes, and `probe` opens without decoding.
"""

from medialane.media.config import FetchLimits, MediaConfig
from medialane.media.data_url import (
    MAX_URL_BYTES,
    PIXMAP_HEADER_BYTES,
    PIXMAP_TYPE,
    RDMA_TYPE,
    PublishedImage,
    decode_base64,
    is_published,
    parse_header,
    pixmap_header,
    pixmap_size,
    read_published,
    split_data_url,
)
from medialane.media.decoders import decode, installed_kinds, measure, needs_probe, probe, sniff
from medialane.media.document import is_pdf, open_document
from medialane.media.embeds import read_embeds
from medialane.media.image import png_of
from medialane.media.image_header import image_size, oriented_size, sniff_image

__all__ = [
    "MAX_URL_BYTES",
    "PIXMAP_HEADER_BYTES",
    "PIXMAP_TYPE",
    "RDMA_TYPE",
    "FetchLimits",
    "MediaConfig",
    "PublishedImage",
    "decode",
    "decode_base64",
    "image_size",
    "installed_kinds",
    "is_pdf",
    "is_published",
    "measure",
    "needs_probe",
    "open_document",
    "oriented_size",
    "parse_header",
    "pixmap_header",
    "pixmap_size",
    "png_of",
    "probe",
    "read_embeds",
    "read_published",
    "sniff",
    "sniff_image",
    "split_data_url",
]
