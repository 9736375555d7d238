"""One end of the handshake, for peers that speak it by hand."""

from medialane.wire import Role
from medialane.wire.authentication import GREETING_BYTES, PROOF_BYTES, Handshake, Secrets
from medialane.wire.security import channel

__all__ = ["GREETING_BYTES", "PROOF_BYTES", "handshake"]


def handshake(secret: str | Secrets, writer=None, **changed) -> Handshake:
    """That of a gateway which has dialled a worker; with `writer`, over the TLS of this connection, if it has some."""
    secrets = secret if isinstance(secret, Secrets) else Secrets([secret.encode()])
    tls = None if writer is None else writer.get_extra_info("ssl_object")
    fields = {"is_dialler": True, "protocol": "rpc", "role": Role.GATEWAY, "peer_role": Role.WORKER, **changed}
    return Handshake(secrets, channel=channel(tls, is_dialler=fields["is_dialler"]), **fields)
