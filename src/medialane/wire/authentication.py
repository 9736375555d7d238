"""Mutual authentication by a shared secret, without I/O: the first bytes of every TCP connection.

**Protocol.** One side has dialled, the other listens; which of them is worker, gateway or store does not matter.

    dialler                               listener
    greeting: version, role, nonce   ->
                                     <-   greeting: version, role, nonce     both are sent at once
    proof                            ->                                      after the listener's greeting
                                     <-   proof                              only after a valid proof of the dialler

Both sides have fixed sizes to send (`GREETING_BYTES`, `PROOF_BYTES`), and nothing else is parsed before the proof is
verified. A proof is HMAC-SHA256, keyed with the secret, over a label for its direction, the name of the protocol that
follows, both greetings and the TLS channel. Hence a proof that is reflected, replayed, made for another protocol, or
relayed by the holder of another certificate is invalid. There are no timestamps: clocks do not matter. A listener that
has not verified its peer reveals only a nonce. A dialler without TLS reveals a proof to any process at the address: the
secret must be random, so that it cannot be guessed from that.

The TLS channel is identified by the two certificates (RFC 5929 `tls-server-end-point`, for both ends): `tls-unique`,
the only channel binding of Python's `ssl`, is undefined for TLS 1.3, and exporters are not available. Without TLS, the
handshake authenticates peers, not bytes: whoever is dialled or can modify packets can relay it, and take over the
connection. Hence TLS is required beyond loopback, unless the operator accepts that (`--rpc-insecure`).

Without a secret, both sides prove the knowledge of the empty one: that detects a secret on one side only.

**Use.** `Security.load(config)` (`security.py`) reads the secret and the certificates of an RpcConfig;
`Authentication(security, protocol, role, peer_role)` describes one kind of connection, whoever dials. With that:

`Listener.listen(address, make_protocol, authentication)` and `dial(address, protocol, authentication)` connect asyncio
protocols, whose `connection_made` is called when the peer is authenticated, over TLS if configured. Both use
`authenticate(sock, make_protocol, authentication, dialled_host=...)` (`security.py`).

Before dialling an address or listening at it, `security.check_host(ip)` refuses it if it needs a secret or TLS that is
not set. All of them raise AuthenticationFailed, with a reason for the log: the peer is disconnected without one.
"""

from __future__ import annotations

import hmac
import secrets as random
import struct
from collections.abc import Sequence
from enum import IntEnum

from medialane.types.errors import AuthenticationFailed

#: Followed by the version. Read as a frame's length it exceeds all limits, so a peer that expects frames disconnects.
_MAGIC = b"\xffMLAUTH"
_VERSION = 1
_NONCE_BYTES = 32
_GREETING = struct.Struct(f">{len(_MAGIC)}sBB{_NONCE_BYTES}s")
GREETING_BYTES = _GREETING.size
PROOF_BYTES = 32

#: First bytes of TLS records: alert and handshake (RFC 8446, section 5.1).
_TLS_RECORDS = (b"\x15", b"\x16")


class Role(IntEnum):
    """What a process is on a connection."""

    GATEWAY = 1
    WORKER = 2
    STORE = 3

    def __str__(self) -> str:
        return self.name.lower()


_ROLES = {int(role): str(role) for role in Role}


class Secrets:
    """The shared secrets: the first is used to prove, all are accepted. Empty: the peer must have none either."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = tuple(keys) or (b"",)

    def __bool__(self) -> bool:
        return self._keys != (b"",)

    def __repr__(self) -> str:
        return f"Secrets({len(self._keys) if self else 'none'})"

    def prove(self, transcript: bytes) -> bytes:
        return hmac.digest(self._keys[0], transcript, "sha256")

    def is_valid(self, proof: bytes, transcript: bytes) -> bool:
        """Compare with the proofs by every key, in a time that does not depend on which of them matches."""
        expected = [hmac.digest(key, transcript, "sha256") for key in self._keys]
        return any([hmac.compare_digest(proof, each) for each in expected])  # noqa: C419 - a list: no early end


class Handshake:
    """One side of the handshake: send `greeting`, pass what arrives to `receive`, and send what it returns, until
    `is_complete`. `rest` are the bytes received after it.

    `channel` identifies the TLS connection, in 32 bytes on both sides; it is empty without TLS.
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        is_dialler: bool,
        protocol: str,
        role: Role,
        peer_role: Role,
        channel: bytes = b"",
    ) -> None:
        self._secrets = secrets
        self._is_dialler = is_dialler
        self._protocol = protocol.encode()
        self._peer_role = peer_role
        self._channel = channel
        self._received = bytearray()
        self._peer_greeting = b""
        self.greeting = _GREETING.pack(_MAGIC, _VERSION, role, random.token_bytes(_NONCE_BYTES))
        self.is_complete = False
        self.rest = b""

    @property
    def num_missing_bytes(self) -> int:
        """Bytes to receive before anything else is sent."""
        if self.is_complete:
            return 0
        return (PROOF_BYTES if self._peer_greeting else GREETING_BYTES) - len(self._received)

    def receive(self, data: bytes | memoryview) -> bytes:
        """Handle received bytes; return bytes to send. Raises AuthenticationFailed: then close, and send nothing.

        Buffers at most one greeting. Not called again once it is complete or has failed.
        """
        view, answer = memoryview(data), b""
        while view and not self.is_complete:
            taken = view[: self.num_missing_bytes]
            view = view[len(taken) :]
            self._received += taken
            if not self._peer_greeting:
                self._check_prefix()
            if not self.num_missing_bytes:
                received = bytes(self._received)
                self._received.clear()
                answer += self._proved(received) if self._peer_greeting else self._greeted(received)
        self.rest = bytes(view)
        return answer

    def _check_prefix(self) -> None:
        """Reject a peer of another protocol by its first bytes."""
        expected = _MAGIC + bytes([_VERSION])
        prefix = bytes(self._received[: len(expected)])
        if expected.startswith(prefix):
            return
        if prefix.startswith(_TLS_RECORDS):
            raise AuthenticationFailed("the peer uses TLS, and --rpc-tls-cert is not set here")
        if prefix.startswith(_MAGIC):
            raise AuthenticationFailed("the peer has another version of the handshake: install the same release")
        raise AuthenticationFailed("the peer is not a process of medialane, or of an earlier release")

    def _greeted(self, greeting: bytes) -> bytes:
        """Handle the peer's greeting; the dialler proves first."""
        if greeting == self.greeting:
            raise AuthenticationFailed("the peer reflects what is sent to it")
        self._peer_greeting = greeting
        return self._prove() if self._is_dialler else b""

    def _proved(self, proof: bytes) -> bytes:
        transcript = self._transcript(by_dialler=not self._is_dialler)
        if not self._secrets.is_valid(proof, transcript):
            raise AuthenticationFailed(f"{self._difference(proof, transcript)}: see --rpc-secret-file")
        _, _, role, _ = _GREETING.unpack(self._peer_greeting)
        if role != self._peer_role:
            name = _ROLES.get(role, f"process of role {role}")
            raise AuthenticationFailed(f"the peer is a {name}, not a {self._peer_role}: wrong address?")
        self.is_complete = True
        return b"" if self._is_dialler else self._prove()

    def _difference(self, proof: bytes, transcript: bytes) -> str:
        if not self._secrets:
            return "the peer has a secret, and none is set here"
        if Secrets().is_valid(proof, transcript):
            return "the peer has no secret, and one is set here"
        return "the peer has another secret, or it expects another protocol"

    def _prove(self) -> bytes:
        return self._secrets.prove(self._transcript(by_dialler=self._is_dialler))

    def _transcript(self, *, by_dialler: bool) -> bytes:
        """Return what one side's proof covers. All parts but the last have fixed sizes."""
        greetings = (self.greeting, self._peer_greeting) if self._is_dialler else (self._peer_greeting, self.greeting)
        label = b"medialane authentication by dialler.." if by_dialler else b"medialane authentication by listener."
        return b"".join([label, *greetings, self._channel or bytes(PROOF_BYTES), self._protocol])
