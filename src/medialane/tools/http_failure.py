"""Why a server could not be asked, in words for an operator: aiohttp's own are for its developers."""

from __future__ import annotations

import os
import ssl

import aiohttp


def describe_failure(error: aiohttp.ClientError | TimeoutError) -> str:
    """Return the reason why there was no answer."""
    match error:
        case TimeoutError():
            return "it did not answer in time"
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not accepted ({_verification(error.certificate_error)})"
        case aiohttp.ClientConnectorSSLError():
            return "it does not use TLS (is it http:// instead of https://?)"
        case aiohttp.ClientConnectorDNSError():
            return "the name of the host cannot be resolved"
        case aiohttp.ClientConnectorError():
            return _reason(error.os_error)
        case aiohttp.ClientOSError():
            return _reason(error)
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without an answer (is it https:// instead of http://?)"
        case aiohttp.ClientResponseError(status=status) if error.__cause__ is None:  # of raise_for_status
            return f"it answered with status {status}"
        case _:
            return "its answer is not valid HTTP"


def _reason(error: OSError) -> str:
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return "none of the host's addresses accepts connections"  # asyncio has several errors then


def _verification(error: Exception) -> str:
    return error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else "invalid"
