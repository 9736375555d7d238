"""The handshake on a blocking TCP socket, with TLS before it if configured: for connections used by threads."""

from __future__ import annotations

import socket
import ssl
import time

from medialane.wire.authenticating import closed_in_handshake, handshake_errors
from medialane.wire.security import Authentication


def authenticate_socket(
    sock: socket.socket, authentication: Authentication, *, dialled_host: str | None = None
) -> socket.socket:
    """Authenticate the peer of a connected socket. Return the socket to use: `sock`, or one that encrypts.

    `sock` may be one of `encrypted`, so that the caller can shut it down meanwhile. `dialled_host` is None on the
    listener's side. Nothing after the handshake is read. The result has no timeout. Owns `sock`, and closes it on
    errors. Raises AuthenticationFailed, at the latest after `--rpc-handshake-timeout`.
    """
    deadline = time.monotonic() + authentication.security.timeout_s
    try:
        with handshake_errors():
            if not isinstance(sock, ssl.SSLSocket):
                sock = encrypted(sock, authentication, dialled_host=dialled_host)
            if isinstance(sock, ssl.SSLSocket):
                _limit(sock, deadline)
                sock.do_handshake()
            _shake_hands(sock, authentication, is_dialler=dialled_host is not None, deadline=deadline)
            sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def encrypted(sock: socket.socket, authentication: Authentication, *, dialled_host: str | None = None) -> socket.socket:
    """Return the socket to use, before any handshake: `sock`, or one that replaces it and will encrypt."""
    tls, is_dialler = authentication.security.tls, dialled_host is not None
    if tls is None:
        return sock
    return tls.context(is_dialler=is_dialler).wrap_socket(
        sock, server_side=not is_dialler, server_hostname=dialled_host, do_handshake_on_connect=False
    )


def _shake_hands(sock: socket.socket, authentication: Authentication, *, is_dialler: bool, deadline: float) -> None:
    tls = sock if isinstance(sock, ssl.SSLSocket) else None
    handshake = authentication.handshake(is_dialler=is_dialler, tls=tls)
    _limit(sock, deadline)
    sock.sendall(handshake.greeting)
    while num_missing := handshake.num_missing_bytes:
        _limit(sock, deadline)
        data = sock.recv(num_missing)
        if not data:
            raise closed_in_handshake(None)
        sock.sendall(handshake.receive(data))


def _limit(sock: socket.socket, deadline: float) -> None:
    """Set the timeout of the next call. Raises TimeoutError."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
