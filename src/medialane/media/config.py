"""Settings of media intake: limits on items, allowed origins, fetch timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated

import msgspec

from medialane.core.errors import StartupFailed
from medialane.core.host import ascii_host
from medialane.core.media import Modality

MIB = 1 << 20

#: vLLM's limit on pixels, above which Pillow refuses to open an image.
_PILLOW_MAX_PIXELS = 178_956_970

_POSITIVE = (
    "max_body_bytes",
    "max_data_url_bytes",
    "max_image_bytes",
    "max_image_pixels",
    "max_image_side",
    "max_image_scans",
    "max_video_bytes",
    "max_video_pixels",
    "max_video_duration_s",
    "max_video_frames",
    "max_sampled_frames",
    "max_video_decoded_bytes",
    "max_audio_bytes",
    "max_audio_duration_s",
    "max_audio_decoded_bytes",
    "max_audio_channels",
    "max_items",
    "max_url_chars",
    "connect_timeout_s",
    "first_byte_timeout_s",
    "image_fetch_timeout_s",
    "audio_fetch_timeout_s",
    "video_fetch_timeout_s",
    "max_fetches",
    "max_fetches_per_host",
)
_NOT_NEGATIVE = ("min_rate_bytes_per_s", "min_rate_grace_s", "max_redirects", "max_cached_urls", "max_fresh_s")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch in bytes and seconds, including redirects and retry."""

    max_bytes: int
    timeout_s: float


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of media intake. Clients cannot change them."""

    max_body_bytes: Annotated[int, msgspec.Meta(description="largest request body, including its media")] = 64 * MIB
    max_data_url_bytes: Annotated[
        int, msgspec.Meta(description="largest media item inside a request, in its base64 form")
    ] = 20 * MIB
    max_image_bytes: Annotated[int, msgspec.Meta(description="largest encoded image, fetched or sent")] = 20 * MIB
    max_image_pixels: Annotated[int, msgspec.Meta(description="most pixels of an image")] = 50_000_000
    max_image_side: Annotated[int, msgspec.Meta(description="largest width or height of an image in pixels")] = 16384
    max_image_scans: Annotated[
        int, msgspec.Meta(description="most scans of a progressive JPEG; a normal one has about 10")
    ] = 64
    jpeg_scaled_decode: Annotated[
        bool,
        msgspec.Meta(
            description="decode large JPEGs at a fraction of their size, at least twice what the model's processor "
            "resizes them to, if that size is known: faster, but answers are no longer token-identical to vLLM's"
        ),
    ] = False
    max_video_bytes: Annotated[int, msgspec.Meta(description="largest encoded video, fetched or sent")] = 128 * MIB
    max_video_pixels: Annotated[int, msgspec.Meta(description="most pixels of a video's frame")] = 4096 * 2304
    max_video_duration_s: Annotated[float, msgspec.Meta(description="longest video")] = 3600.0
    max_video_frames: Annotated[int, msgspec.Meta(description="most frames of a video that may have to be decoded")] = (
        36_000
    )
    max_sampled_frames: Annotated[
        int, msgspec.Meta(description="most frames of one video that are passed to the model")
    ] = 768
    max_video_decoded_bytes: Annotated[
        int, msgspec.Meta(description="most memory that the sampled frames of one video may take")
    ] = 512 * MIB
    max_audio_bytes: Annotated[int, msgspec.Meta(description="largest encoded audio file, fetched or sent")] = 25 * MIB
    max_audio_duration_s: Annotated[float, msgspec.Meta(description="longest audio")] = 600.0
    max_audio_decoded_bytes: Annotated[
        int, msgspec.Meta(description="most memory for the samples of one audio item, over all channels")
    ] = 256 * MIB
    max_audio_channels: Annotated[int, msgspec.Meta(description="most audio channels")] = 8
    max_items: Annotated[
        int, msgspec.Meta(description="most media items of one request (vLLM's --limit-mm-per-prompt applies as well)")
    ] = 16
    max_url_chars: Annotated[int, msgspec.Meta(description="longest media URL that is not a data: URL")] = 8192

    allowed_media_domains: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="hosts that media may be fetched from, exact names; none given allows every host"),
    ] = ()
    allowed_media_networks: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="non-public networks (CIDR) that media may be fetched from, on any port"),
    ] = ()
    allowed_media_ports: Annotated[
        tuple[int, ...], msgspec.Meta(description="ports of public addresses that media may be fetched from")
    ] = (80, 443, 8000, 8080, 8443)
    allowed_local_media_path: Annotated[
        str | None, msgspec.Meta(description="folder that file: URLs may refer to; without it file: URLs are refused")
    ] = None

    connect_timeout_s: Annotated[float, msgspec.Meta(description="longest time to connect to a media host")] = 3.0
    first_byte_timeout_s: Annotated[
        float, msgspec.Meta(description="longest wait for a media host's response to begin, and between two reads")
    ] = 5.0
    image_fetch_timeout_s: Annotated[
        float, msgspec.Meta(description="longest time to fetch one image, including redirects and retry")
    ] = 10.0
    audio_fetch_timeout_s: Annotated[float, msgspec.Meta(description="the same for one audio item")] = 20.0
    video_fetch_timeout_s: Annotated[float, msgspec.Meta(description="the same for one video")] = 30.0
    min_rate_bytes_per_s: Annotated[
        float, msgspec.Meta(description="a fetch slower than this is aborted; 0 disables the limit")
    ] = 10_000.0
    min_rate_grace_s: Annotated[float, msgspec.Meta(description="time before min_rate_bytes_per_s applies")] = 2.0
    max_redirects: Annotated[int, msgspec.Meta(description="most redirects of one fetch")] = 3
    max_fetches: Annotated[int, msgspec.Meta(description="most concurrent connections to media hosts")] = 128
    max_fetches_per_host: Annotated[int, msgspec.Meta(description="most connections to one media host")] = 32
    max_cached_urls: Annotated[
        int, msgspec.Meta(description="most URLs whose content hash is cached, as their cache headers allow")
    ] = 16384
    max_fresh_s: Annotated[
        float, msgspec.Meta(description="longest time that a URL's content is considered fresh, whatever its headers")
    ] = 86400.0

    def validate(self) -> None:
        """Raise StartupFailed naming the first invalid setting."""
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise StartupFailed(f"{name} must be positive")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise StartupFailed(f"{name} must not be negative")
        if self.max_image_pixels > _PILLOW_MAX_PIXELS:
            raise StartupFailed(f"max_image_pixels must be at most {_PILLOW_MAX_PIXELS}")
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
                ascii_host(domain)
            except ValueError as error:
                raise StartupFailed(f"allowed_media_domains: {error}") from error

    def fetch_limits(self, modality: Modality) -> FetchLimits:
        """Return the limits for fetching one item of this modality."""
        return {
            "image": FetchLimits(self.max_image_bytes, self.image_fetch_timeout_s),
            "audio": FetchLimits(self.max_audio_bytes, self.audio_fetch_timeout_s),
            "video": FetchLimits(self.max_video_bytes, self.video_fetch_timeout_s),
        }[modality]
