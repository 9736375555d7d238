"""Settings of media intake: limits on items, allowed origins, fetch timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import msgspec
from msgspec import field

from medialane.types.errors import StartupFailed
from medialane.types.media import MediaSource, Modality
from medialane.types.setting import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ascii_host,
    ascii_name,
    check_bounds,
)

MIB = 1 << 20

#: vLLM's limit on pixels, above which Pillow refuses to open an image.
_PILLOW_MAX_PIXELS = 178_956_970

#: Highest resolution of a page: above it, a small page would have more pixels than any model uses.
MAX_DPI = 1200

#: A preparer sends the text of a document's pages in one message.
MAX_TEXT_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch in bytes and seconds, including redirects and retry."""

    max_bytes: int
    timeout_s: float


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of media intake. Clients cannot change them."""

    max_body_bytes: PositiveInt = field(default=64 * MIB, name="media-max-body-bytes")
    """largest request body, including its media"""
    max_data_url_bytes: PositiveInt = field(default=20 * MIB, name="media-max-data-url-bytes")
    """largest media item inside a request, in base64"""
    max_image_bytes: PositiveInt = field(default=20 * MIB, name="media-max-image-bytes")
    """largest encoded image, fetched or sent"""
    max_image_pixels: PositiveInt = field(default=50_000_000, name="media-max-image-pixels")
    """most pixels of an image"""
    max_image_side: PositiveInt = field(default=16384, name="media-max-image-side")
    """largest width or height of an image in pixels"""
    max_image_scans: PositiveInt = field(default=64, name="media-max-image-scans")
    """most scans of a progressive JPEG; a normal one has about 10"""
    max_video_bytes: PositiveInt = field(default=128 * MIB, name="media-max-video-bytes")
    """largest encoded video, fetched or sent"""
    max_video_pixels: PositiveInt = field(default=4096 * 2304, name="media-max-video-pixels")
    """most pixels of a video's frame"""
    max_video_duration_s: PositiveFloat = field(default=3600.0, name="media-max-video-duration")
    """longest video"""
    max_video_frames: PositiveInt = field(default=36_000, name="media-max-video-frames")
    """most frames of a video to decode"""
    max_sampled_frames: PositiveInt = field(default=768, name="media-max-sampled-frames")
    """most frames of one video passed to the model"""
    max_video_decoded_bytes: PositiveInt = field(default=512 * MIB, name="media-max-video-decoded-bytes")
    """most memory for the sampled frames of one video"""
    max_audio_bytes: PositiveInt = field(default=25 * MIB, name="media-max-audio-bytes")
    """largest encoded audio file, fetched or sent"""
    max_audio_duration_s: PositiveFloat = field(default=600.0, name="media-max-audio-duration")
    """longest audio"""
    max_audio_decoded_bytes: PositiveInt = field(default=256 * MIB, name="media-max-audio-decoded-bytes")
    """most memory for the samples of one audio item, all channels"""
    max_audio_channels: PositiveInt = field(default=8, name="media-max-audio-channels")
    """most audio channels"""
    max_document_bytes: PositiveInt = field(default=32 * MIB, name="media-max-document-bytes")
    """largest document (PDF), fetched or sent"""
    max_document_pages: PositiveInt = field(default=100, name="media-max-document-pages")
    """most pages of all documents of one prompt, of those that it chooses"""
    max_document_text_bytes: PositiveInt = field(default=MIB, name="media-max-document-text-bytes")
    """most text of the pages of a document"""
    max_page_pixels: PositiveInt = field(default=8_000_000, name="media-max-page-pixels")
    """most pixels of a page of a document; larger ones are rendered at a lower resolution"""
    document_dpi: PositiveInt = field(default=144, name="media-document-dpi")
    """resolution of the pages of documents, unless a request has one, or the model uses less"""
    max_items: PositiveInt = field(default=16, name="media-max-items")
    """most media items of one prompt (besides vLLM's --limit-mm-per-prompt), pages of documents not counted"""
    max_batch_items: PositiveInt = field(default=256, name="media-max-batch-items")
    """most media items of one request with several prompts"""
    max_url_chars: PositiveInt = field(default=8192, name="media-max-url-chars")
    """longest media URL that is not a data: URL"""

    allowed_media_domains: tuple[str, ...] = field(default=(), name="allow-media-domain")
    """the only hosts that media may be fetched from, exact names; none: every host"""
    allowed_media_networks: tuple[str, ...] = field(default=(), name="allow-media-network")
    """non-public networks (CIDR) that media may be fetched from, on any port"""
    allowed_media_ports: tuple[int, ...] = field(default=(80, 443, 8000, 8080, 8443), name="media-allowed-ports")
    """ports of public addresses that media may be fetched from"""
    allowed_local_media_path: str | None = field(default=None, name="allowed-local-media-path")
    """folder that file: URLs may refer to; none: file: URLs are refused"""
    allow_rdma: bool = field(default=False, name="allow-media-rdma")
    """read images published for RDMA (NVIDIA Dynamo's nixl_connect) by NIXL; only if all clients are trusted with the
    memory of other processes"""

    image_fetch_timeout_s: PositiveFloat = field(default=10.0, name="media-image-fetch-timeout")
    """longest time to fetch one image, with redirects and retry; the wait for a place among --media-max-fetches may
    take as long again"""
    audio_fetch_timeout_s: PositiveFloat = field(default=20.0, name="media-audio-fetch-timeout")
    """the same for one audio item"""
    video_fetch_timeout_s: PositiveFloat = field(default=30.0, name="media-video-fetch-timeout")
    """the same for one video"""
    document_fetch_timeout_s: PositiveFloat = field(default=20.0, name="media-document-fetch-timeout")
    """the same for one document"""
    min_rate_bytes_per_s: NonNegativeFloat = field(default=10_000.0, name="media-min-rate-bytes-per-s")
    """slower fetches lose their place among --media-max-fetches while other hosts wait (503 `media_overloaded`); 0:
    never"""
    min_rate_grace_s: NonNegativeFloat = field(default=2.0, name="media-min-rate-grace")
    """time before that applies"""
    max_redirects: NonNegativeInt = field(default=3, name="media-max-redirects")
    """most redirects of one fetch"""
    max_fetches: PositiveInt = field(default=128, name="media-max-fetches")
    """most concurrent fetches; without a place in time: 503 `media_overloaded`"""
    max_fetches_per_host: PositiveInt = field(default=32, name="media-max-fetches-per-host")
    """most concurrent fetches from one host; fewer when few places are free"""
    max_cached_urls: NonNegativeInt = field(default=16384, name="media-max-cached-urls")
    """most URLs with a cached content hash, as their cache headers allow"""
    max_fresh_s: NonNegativeFloat = field(default=86400.0, name="media-max-fresh")
    """longest time that a URL's content is considered fresh, whatever its headers say"""

    def validate(self) -> None:
        """Raise StartupFailed naming the first invalid setting."""
        check_bounds(self)
        if self.max_image_pixels > _PILLOW_MAX_PIXELS:
            raise StartupFailed(f"max_image_pixels must be at most {_PILLOW_MAX_PIXELS}")
        if self.max_document_text_bytes > MAX_TEXT_BYTES:
            raise StartupFailed(f"max_document_text_bytes must be at most {MAX_TEXT_BYTES}")
        if self.document_dpi > MAX_DPI:
            raise StartupFailed(f"document_dpi must be at most {MAX_DPI}")
        self._check_hosts()
        if not all(0 < port < 65536 for port in self.allowed_media_ports):
            raise StartupFailed("allowed_media_ports must be between 1 and 65535")
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise StartupFailed(f"allowed_local_media_path {self.allowed_local_media_path} is not a folder")

    def _check_hosts(self) -> None:
        for network in self.allowed_media_networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise StartupFailed(f"allowed_media_networks: {error}") from error
        for domain in self.allowed_media_domains:
            try:
                ascii_host(ascii_name(domain))
            except ValueError as error:
                raise StartupFailed(f"allowed_media_domains: {error}") from error

    def fetch_limits(self, source: MediaSource) -> FetchLimits:
        """Return the limits for fetching one item of this modality, or a document."""
        return FetchLimits(getattr(self, f"max_{source}_bytes"), getattr(self, f"{source}_fetch_timeout_s"))

    def max_pixels(self, modality: Modality) -> int:
        """Return the most pixels of an image or a frame, for a modality that has pixels."""
        limit: int = getattr(self, f"max_{modality}_pixels")
        return limit
