"""What an operator reads if a server could not be asked."""

import asyncio
import re
import ssl
from contextlib import asynccontextmanager

import pytest
import trustme

from medialane.cli.status import read_state
from medialane.types.errors import StartupFailed


async def reason_of(url, **options):
    with pytest.raises(StartupFailed) as failed:
        await read_state(url, **options)
    assert not re.search(r"ssl:|\[|Errno|Client\w+Error|None", failed.value.message), "words of the library"
    return failed.value.message.partition(f"no gateway answers at {url}: ")[2]


@asynccontextmanager
async def server(answer=b"", context=None):
    async def serve(reader, writer):
        await reader.read(1)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as found:
        yield found.sockets[0].getsockname()[1]


async def test_refused_connection():
    assert await reason_of("http://127.0.0.1:1") == "Connection refused"


async def test_several_addresses():
    assert "accepts connections" in await reason_of("http://localhost:1") or "refused" in await reason_of(
        "http://localhost:1"
    )


async def test_unknown_host():
    assert "cannot be resolved" in await reason_of("http://no-such-host.invalid:80")


async def test_server_that_closes_the_connection():
    async with server() as port:
        assert "closed the connection" in await reason_of(f"http://127.0.0.1:{port}")


async def test_server_without_http():
    async with server(b"220 smtp.example.com\r\n") as port:
        assert "not valid HTTP" in await reason_of(f"http://127.0.0.1:{port}")


async def test_server_without_tls():
    async with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "does not use TLS" in await reason_of(f"https://127.0.0.1:{port}")


async def test_certificate_that_is_not_accepted():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with server(context=context) as port:
        assert "certificate is not accepted" in await reason_of(f"https://127.0.0.1:{port}")
