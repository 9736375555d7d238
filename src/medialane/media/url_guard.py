"""Which URLs and addresses media may be fetched from (SSRF protection).

Theory of operation. Parsers disagree about hostile URLs, and names change their addresses. So URLs are encoded first
(`_encode`: what a URL may not contain is percent-encoded, an international host is in punycode), and the result is
restricted to a strict grammar before the HTTP client's own parser sees it (both must agree on host and port). The
decision is made on the address to connect to: the client's resolver checks every address of a name, and its socket
factory checks the address once more before connecting. Every redirect passes all checks again.

An address is public if it is globally reachable unicast, and so is any IPv4 address embedded in it (mapped, compatible,
6to4, Teredo, NAT64): `ipaddress.is_global` alone considers several addresses global that lead to internal hosts.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from yarl import URL

from medialane.media.config import MediaConfig
from medialane.types.errors import InvalidMediaUrl, MediaUrlForbidden, UnsupportedUrlScheme, UpstreamFailed
from medialane.types.setting import ascii_name

Address = IPv4Address | IPv6Address

#: Not encoded but refused: parsers disagree about backslashes, and others remove control characters.
_FORBIDDEN_CHARACTERS = re.compile(r"^ |[\x00-\x1f\x7f\\]")
#: Everything else that is valid (RFC 3986) stays as it is, because URLs may be signed.
_TO_ENCODE = re.compile(rb'[ "<>^`{|}\x80-\xff]|%(?![0-9A-Fa-f]{2})')
#: Scheme and host up to the port, where the host is not ASCII.
_INTERNATIONAL_HOST = re.compile(r"\A((?:https?:)?//)([^/?#@:\[\]%]*[^\x00-\x7f][^/?#@:\[\]%]*)", re.IGNORECASE)
_USER = re.compile(r"https?://[^/?#]*@", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(
    r"https?://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[^\]]*)?\])(?::(?P<port>[0-9]{1,5}))?(?=[/?#]|\Z)",
    re.IGNORECASE | re.ASCII,
)
#: A host whose last label is a number is an IPv4 address in some spelling (WHATWG URL, "ends in a number").
_ENDS_IN_A_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?\Z", re.ASCII)

#: Names that can be resolved (RFC 1035, section 2.3.4); underscores occur in practice.
_NAME = re.compile(r"(?=.{1,254}\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?", re.ASCII)

_GLOBAL_UNICAST_6 = IPv6Network("2000::/3")
#: Not public, whatever this Python's `ipaddress` reports, which changes between releases (gh-113171).
_NOT_PUBLIC_4 = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments (RFC 6890); Oracle Cloud's metadata service is at 192.0.0.192
    IPv4Network("192.88.99.0/24"),  # relays of 6to4 (RFC 7526)
    IPv4Network("168.63.129.16/32"),  # Azure's platform services, reachable only from its virtual machines
)
_NOT_PUBLIC_6 = (
    IPv6Network("2001::/23"),  # protocol assignments (RFC 2928), Teredo and ORCHID among them
    IPv6Network("2001:db8::/32"),  # documentation (RFC 3849, RFC 9637)
    IPv6Network("3fff::/20"),
)
#: IPv4 in the last 32 bits: compatible (RFC 4291), NAT64 (RFC 6052). Local NAT64 (RFC 8215) is never public.
_EMBEDDING = (IPv6Network("::/96"), IPv6Network("64:ff9b::/96"))

#: Precedes an IPv4 address in an ISATAP interface identifier; the universal/local bit may be set (RFC 5214).
_ISATAP = 0x00005EFE

_DEFAULT_PORTS = {"http": 80, "https": 443}


_BY_OPERATOR: Final = "which only the server's operator can permit (--allow-media-network)"


class UrlGuard:
    """Checks whether a URL may be fetched and an address connected to. Refusals are not retried."""

    def __init__(self, config: MediaConfig) -> None:
        self._max_chars = config.max_url_chars
        self._domains = frozenset(ascii_name(name).rstrip(".") for name in config.allowed_media_domains)
        self._ports = frozenset(config.allowed_media_ports)
        self._networks = tuple(ip_network(network) for network in config.allowed_media_networks)

    def parse(self, url: str) -> URL:
        """Validate a URL and return it in the form to be requested: encoded, otherwise byte for byte.

        Raises InvalidMediaUrl, UnsupportedUrlScheme, MediaUrlForbidden.
        """
        url = self._encode(url)
        scheme = _SCHEME.match(url)
        if scheme is None:
            raise InvalidMediaUrl("the media URL has no scheme")
        if scheme[1].lower() not in _DEFAULT_PORTS:
            raise UnsupportedUrlScheme("media URLs must be http, https or data")
        authority = _AUTHORITY.match(url)
        if authority is None and _USER.match(url):
            raise InvalidMediaUrl("the media URL has a user name or password, which is not supported")
        if authority is None:
            raise InvalidMediaUrl("the media URL has no valid host")
        port = int(authority["port"] or _DEFAULT_PORTS[scheme[1].lower()])
        self._check_host(authority["host"].lower(), port)
        return self._client_url(url, authority["host"].strip("[]").lower(), port)

    def follow(self, url: URL, location: str | None) -> URL:
        """Return the validated target of a redirect. Raises UpstreamFailed, and what `parse` raises."""
        if location is None:
            raise UpstreamFailed("the media host sent a redirect without a location")
        location = self._encode(location)
        try:
            target = location if _SCHEME.match(location) else str(url.join(URL(location, encoded=True)))
        except ValueError as error:
            raise InvalidMediaUrl("the media host redirected to an invalid URL") from error
        parsed = self.parse(target)
        if url.scheme == "https" and parsed.scheme != "https":
            raise MediaUrlForbidden("the media URL redirects from https to http")
        return parsed

    def check_address(self, address: str, port: int) -> None:
        """Raise MediaUrlForbidden unless connecting to this address is allowed."""
        inner = tuple(unwrap(ip_address(address)))
        if all(any(a in network for network in self._networks) for a in inner):
            return
        if not all(_is_public(a) or any(a in network for network in self._networks) for a in inner):
            raise MediaUrlForbidden(f"the media URL resolves to a private address, {_BY_OPERATOR}")
        if port not in self._ports:
            raise MediaUrlForbidden(f"the port of the media URL is not a usual one, {_BY_OPERATOR}")

    def open_socket(self, addr_info: tuple[int, int, int, str, tuple[str | int, ...]]) -> socket.socket:
        """The HTTP client's socket factory: checks an address right before connecting to it."""
        family, kind, protocol, _, (address, port, *_) = addr_info
        self.check_address(str(address), int(port))
        return socket.socket(family, kind, protocol)

    def _encode(self, url: str) -> str:
        """Return the URL with what it may not contain percent-encoded, and its host in punycode. Raises
        InvalidMediaUrl."""
        if len(url) <= self._max_chars:
            if _FORBIDDEN_CHARACTERS.search(url):
                raise InvalidMediaUrl("the media URL has a leading space, a control character or a backslash")
            try:
                url = _INTERNATIONAL_HOST.sub(lambda match: match[1] + ascii_name(match[2]), url)
                data = url.encode(errors="surrogateescape")  # bytes of a redirect that are not UTF-8
            except UnicodeError as error:
                raise InvalidMediaUrl("the media URL has an invalid host or character") from error
            url = _TO_ENCODE.sub(lambda match: b"%%%02X" % match[0][0], data).decode()
        if len(url) > self._max_chars:
            raise InvalidMediaUrl(f"the media URL has {len(url)} characters, more than {self._max_chars}")
        return url

    def _check_host(self, host: str, port: int) -> None:
        if self._domains and host.rstrip(".") not in self._domains:
            raise MediaUrlForbidden("the server does not permit the host of the media URL (--allow-media-domain)")
        if "%" in host:
            raise MediaUrlForbidden("the media URL has a link-local scope id")
        if host.startswith("["):
            try:
                self.check_address(str(IPv6Address(host[1:-1])), port)
            except AddressValueError as error:
                raise InvalidMediaUrl("the media URL has no valid host") from error
        elif _ENDS_IN_A_NUMBER.search(host):
            try:
                self.check_address(str(IPv4Address(host)), port)
            except AddressValueError as error:
                raise MediaUrlForbidden("the media URL has an address in a non-canonical form") from error
        elif not _NAME.fullmatch(host):
            raise InvalidMediaUrl("the media URL has no valid host")

    def _client_url(self, url: str, host: str, port: int) -> URL:
        """Parse with the HTTP client's parser, which does not encode again."""
        try:
            parsed = URL(url.partition("#")[0], encoded=True)
            # `host` decodes punycode, which may fail.
            agreed = bool(parsed.host) and (parsed.raw_host or "").lower() == host and parsed.port == port
        except ValueError as error:
            raise InvalidMediaUrl("the media URL is not valid") from error
        if not agreed:
            raise InvalidMediaUrl("the media URL is ambiguous")
        return parsed


def unwrap(address: Address) -> Iterator[Address]:
    """Yield the addresses that a packet to `address` may reach."""
    if isinstance(address, IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif any(address in network for network in _EMBEDDING):
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    elif int(address) >> 32 & 0xFDFFFFFF == _ISATAP:
        yield from (address, IPv4Address(int(address) & 0xFFFFFFFF))
    else:
        yield address


def _is_public(address: Address) -> bool:
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _GLOBAL_UNICAST_6 and not any(address in network for network in _NOT_PUBLIC_6)
