"""Who may look at everybody's requests: an operator by the admin key, or anyone on this machine if the server listens
on loopback only and has no such key.

A browser sends the key once, and gets a cookie. It is signed with the key, not kept: so it is valid at all gateways of
a port and after their restart, and ends with its time or with the key. It opens nothing but what of `access.OPERATOR`
only reads: a change needs the key itself, which no page of another site can send.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING

from medialane.gateway.http.asgi import header
from medialane.wire.security import is_loopback

if TYPE_CHECKING:
    from starlette.types import Scope

#: How long a cookie is valid.
SESSION_S = 12 * 3600
_PURPOSE = b"medialane page "
#: Beginnings of headers of a request that came through another server: that one is on this machine, its client need
#: not be.
_PROXY_HEADERS = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"via", b"x-envoy-", b"x-client-ip")


class Sessions:
    """Cookies for the digests of the admin keys `admin`."""

    def __init__(self, admin: Sequence[bytes], *, clock: Callable[[], float] = time.time) -> None:
        self._admin = admin
        self._clock = clock

    def cookie(self, digest: bytes, scope: Scope) -> str:
        """Return the header that begins a session with this key, which has been checked."""
        expires = str(int(self._clock()) + SESSION_S)
        return _set_cookie(scope, f"{expires}.{_signature(digest, expires)}", SESSION_S)

    @staticmethod
    def no_cookie(scope: Scope) -> str:
        """Return the header that ends a session."""
        return _set_cookie(scope, "", 0)

    def is_valid(self, scope: Scope) -> bool:
        """Return whether the request has a cookie of a session that has not ended."""
        pairs = (pair.strip().partition("=") for pair in header(scope, b"cookie").decode("latin-1").split(";"))
        value = next((value for name, _, value in pairs if name == _name(scope)), "")
        expires, _, given = value.partition(".")
        if not (expires.isascii() and expires.isdecimal() and len(expires) < 16 and given.isascii()):
            return False
        matching = sum(hmac.compare_digest(_signature(digest, expires), given) for digest in self._admin)
        return matching > 0 and self._clock() < int(expires)


def is_from_this_machine(scope: Scope) -> bool:
    """Return whether a request to a server on loopback was made by a program on this machine, not by a proxy for
    someone else, nor by another site's page in a browser: those have its name in Host or Origin (DNS rebinding). Host
    alone proves nothing: the client of a proxy chooses it. nginx without settings adds no header, and asks by HTTP/1.0.
    """
    if scope.get("http_version") == "1.0" or any(name.startswith(_PROXY_HEADERS) for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    is_near = client is None or is_loopback(client[0])  # None: on a Unix socket of this user
    return is_near and is_loopback(_host(scope)) and is_same_site(scope)


def is_of_foreign_page(scope: Scope) -> bool:
    """Return whether a page of another site makes the request. One that has its own name in Host and Origin may be such
    a page, which has given its name our address (DNS rebinding); an address is nobody's."""
    if not is_same_site(scope):
        return True
    host = _host(scope)
    return bool(header(scope, b"origin")) and not (host == "localhost" or _is_address(host))


def is_same_site(scope: Scope) -> bool:
    """Return whether no page of another site makes the request."""
    origin = header(scope, b"origin")
    if header(scope, b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
        return False
    return not origin or origin.partition(b"://")[2] == header(scope, b"host")


def _host(scope: Scope) -> str:
    """Return the name or address by which the server was asked."""
    host = header(scope, b"host").decode("latin-1")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _signature(digest: bytes, expires: str) -> str:
    return hmac.new(digest, _PURPOSE + expires.encode(), "sha256").hexdigest()


def _name(scope: Scope) -> str:
    """Return the cookie's name: browsers send the cookies of a host to all of its ports."""
    server = scope.get("server")
    return f"medialane_{server[1] if server is not None else 0}"


def _set_cookie(scope: Scope, value: str, max_age_s: int) -> str:
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    return f"{_name(scope)}={value}; Path=/medialane; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"
