"""Responses of the corpus origin by path, mostly misbehaviour."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterable

from media_files import picture

from origin import Asked, Route

OK = b"HTTP/1.1 200 OK\r\n"


def status(number: int, body: bytes = b"", **headers: object) -> Route:
    """Underscores in header names are hyphens. The connection is closed afterwards if a header says so."""
    named = {"Content-Length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"HTTP/1.1 {number} X", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
    answer = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    async def send(asked: Asked) -> None:
        await asked.send(answer)
        if named.get("Connection") == "close":
            raise ConnectionError

    return send


def raw(answer: bytes, *, close: bool = True) -> Route:
    """Send bytes and close the connection, or stay silent."""

    async def send(asked: Asked) -> None:
        await asked.send(answer)
        if close:
            raise ConnectionError
        await asyncio.Event().wait()

    return send


def redirect(location: str, number: int = 302, **headers: object) -> Route:
    """`{canary}`, `{origin}` and `{tls}` in the location are the ports of those."""

    async def send(asked: Asked) -> None:
        hosts = asked.origin
        target = location.format(canary=hosts.canary_port, origin=hosts.port, tls=hosts.tls_port)
        await status(number, Location=target, **headers)(asked)

    return send


def dripping(first: bytes, pause_s: float, drop: bytes = b"x") -> Route:
    """A first part, then one byte after each delay, forever."""

    async def send(asked: Asked) -> None:
        await asked.send(first)
        while True:
            await asyncio.sleep(pause_s)  # time: the origin's rate
            await asked.send(drop)

    return send


def flood(first: bytes, piece: bytes) -> Route:
    """A first part, then the same chunk as fast as it is read, forever."""

    async def send(asked: Asked) -> None:
        await asked.send(first)
        many = piece * max(1, 65536 // len(piece))
        while True:
            await asked.send(many)

    return send


async def reset(asked: Asked) -> None:
    asked.writer.transport.abort()
    raise ConnectionError


def headers(lines: Iterable[str]) -> bytes:
    return OK + "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


GOOD = picture(999)

ROUTES: dict[str, Route] = {
    "/good.jpg": status(200, GOOD),
    "/good-once.jpg": status(200, GOOD, Connection="close"),
    "/": status(404),
    "/good.jpg%20": status(404),
    # Redirects
    "/to-canary": redirect("http://127.0.0.1:{canary}/"),
    "/to-canary-relative": redirect("//127.0.0.1:{canary}/x.jpg"),
    "/to-canary-decimal": redirect("http://2130706433:{canary}/"),
    "/to-canary-6": redirect("http://[::1]:{canary}/"),
    "/to-canary-mapped": redirect("http://[::ffff:7f00:1]:{canary}/"),
    "/to-canary-name": redirect("http://inside.test:{canary}/"),
    "/to-canary-tls": redirect("https://127.0.0.1:{canary}/"),
    "/to-user": redirect("http://user:secret@127.0.0.2:{origin}/good.jpg"),
    "/to-user-at-canary": redirect("http://127.0.0.2:{origin}@127.0.0.1:{canary}/"),
    "/to-backslash": redirect("http://127.0.0.1:{canary}\\@127.0.0.2:{origin}/"),
    "/to-backslashes": redirect("\\\\127.0.0.1:{canary}\\x"),
    "/to-slashes": redirect("///127.0.0.1:{canary}/x"),
    "/to-space": redirect("http://127.0.0.1 .good.test:{canary}/"),
    "/to-other-port": redirect("http://8.8.8.8:6379/"),
    "/to-metadata": redirect("http://169.254.169.254/latest/meta-data/"),
    "/to-file": redirect("file:///etc/passwd"),
    "/to-data": redirect("data:image/png;base64,AAAA"),
    "/to-ftp": redirect("ftp://127.0.0.1:{canary}/x"),
    "/to-gopher": redirect("gopher://127.0.0.1:{canary}/_x"),
    "/to-nothing": status(302),
    "/to-empty": redirect(""),
    "/to-long": redirect("/" + "x" * 8175),
    "/to-itself": redirect("/to-itself"),
    "/to-rebound": redirect("http://rebinding.test:{origin}/to-rebound-again", Connection="close"),
    "/to-rebound-again": redirect("http://rebinding.test:{origin}/good.jpg", Connection="close"),
    "/to-good": redirect("/good.jpg", 307),
    "/refresh": status(200, b"", Refresh="0; url=http://127.0.0.1/"),
    # Time
    "/slow-headers": dripping(OK, 0.3),
    "/slow-header-lines": dripping(OK, 0.3, b"a: b\r\n"),
    "/slow-body": dripping(OK + b"Content-Length: 90000\r\n\r\n", 0.2),
    "/slow-chunks": dripping(OK + b"Transfer-Encoding: chunked\r\n\r\n", 0.2, b"1\r\nx\r\n"),
    "/slow-interim": dripping(b"", 0.3, b"HTTP/1.1 100 Continue\r\n\r\n"),
    "/silent": raw(b"", close=False),
    "/silent-after-headers": raw(OK + b"Content-Length: 90000\r\n\r\n", close=False),
    "/silent-in-body": raw(OK + b"Content-Length: 90000\r\n\r\n" + bytes(50000), close=False),
    # Size
    "/endless": flood(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"2000\r\n" + bytes(0x2000) + b"\r\n"),
    "/endless-crumbs": flood(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "/endless-chunk-size": flood(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "/endless-chunk-extension": flood(OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "/endless-trailers": flood(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"a: b\r\n"),
    "/endless-until-close": flood(OK + b"\r\n", bytes(8192)),
    "/endless-interim": flood(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    "/endless-header": flood(OK + b"X: ", b"y"),
    "/endless-header-name": flood(OK, b"y"),
    "/endless-headers": flood(OK, b"a: b\r\n"),
    "/endless-reason": flood(b"HTTP/1.1 200 ", b"y"),
    "/endless-blank-lines": flood(b"", b"\r\n"),
    "/declared-10-gb": raw(OK + b"Content-Length: 10000000000\r\n\r\n", close=False),
    "/declared-2-64": raw(OK + b"Content-Length: 18446744073709551616\r\n\r\n", close=False),
    "/declared-digits": raw(OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", close=False),
    # HTTP
    "/large-header": raw(headers(["X: " + "y" * 1_000_000, "Content-Length: 1"]) + b"x"),
    "/many-headers": raw(headers([*(f"X{n}: y" for n in range(10_000)), "Content-Length: 1"]) + b"x"),
    "/no-http": raw(b"SSH-2.0-OpenSSH_9.9\r\n"),
    "/http-0.9": raw(GOOD),
    "/nul-header": raw(headers(["X: a\0b", "Content-Length: 1"]) + b"x"),
    "/folded-header": raw(headers(["X: a", " b", "Content-Length: 1"]) + b"x"),
    "/status-99999": raw(b"HTTP/1.1 99999 OK\r\nContent-Length: 1\r\n\r\nx"),
    "/status-none": raw(b"HTTP/1.1 \r\nContent-Length: 1\r\n\r\nx"),
    "/switching": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n" + GOOD),
    "/negative-length": raw(OK + b"Content-Length: -1\r\n\r\n" + GOOD),
    "/two-lengths": raw(OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + GOOD),
    "/length-and-chunked": raw(OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
    "/unknown-transfer-coding": raw(OK + b"Transfer-Encoding: rot13\r\n\r\n" + GOOD),
    "/short-body": raw(OK + b"Content-Length: %d\r\n\r\n" % (len(GOOD) + 1) + GOOD),
    "/cut-chunk": raw(OK + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + GOOD),
    "/bad-chunk": raw(OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nxxxxx\r\n0\r\n\r\n"),
    "/interim": raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3 + OK + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD),
    "/until-close": raw(OK + b"\r\n" + GOOD),
    "/gzip": status(200, gzip.compress(GOOD), Content_Encoding="gzip"),
    "/deflate": status(200, zlib.compress(GOOD), Content_Encoding="deflate"),
    "/gzip-of-none": status(200, GOOD, Content_Encoding="gzip"),
    "/gzip-bomb": status(200, gzip.compress(bytes(50_000_000)), Content_Encoding="gzip"),
    "/coding-chain": status(200, GOOD, Content_Encoding="gzip, identity"),
    "/coding-unknown": status(200, GOOD, Content_Encoding="br;q=1"),
    "/gzip-transfer": raw(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
    "/gzip-unsaid": status(200, gzip.compress(GOOD)),
    "/reset": reset,
    "/hang-up": raw(b""),
    # Not an image
    "/html": status(200, b"<html><body>not found</body></html>", Content_Type="text/html"),
    "/html-as-jpeg": status(200, b"<html><body>not found</body></html>", Content_Type="image/jpeg"),
    "/jpeg-as-html": status(200, GOOD, Content_Type="text/html"),
    "/empty": status(200),
    "/partial": status(206, GOOD, Content_Range="bytes 0-9/100"),
    "/whole": status(206, GOOD, Content_Range=f"bytes 0-{len(GOOD) - 1}/{len(GOOD)}"),
    "/203": status(203, GOOD),
    "/to-spaces": redirect("/gut \u00c3\u00bc.jpg?a=%2F"),  # UTF-8, in a header of Latin-1
    "/gut%20%C3%BC.jpg": status(200, GOOD),
    "/no-content": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "/not-modified": raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    # Headers that are read
    "/odd-expiry": status(200, GOOD, Expires="Thu, 01 Jan 2020 00:00:00 +99999999999999", Date="x"),
    "/odd-date": status(200, GOOD, Expires="Thu, 01 Jan 99999999999999999999 00:00:00 GMT", Date="0"),
    "/odd-age": status(200, GOOD, Cache_Control="max-age=" + "9" * 4000, Age="9" * 4000),
    "/odd-directives": status(200, GOOD, Cache_Control="=,,=;max-age=-1,max-age=1e9,\xff" + "," * 3000),
    "/odd-tag": status(200, GOOD, ETag='W/"' + "\xff" * 3000, Last_Modified="\xfe"),
    "/odd-retry": status(503, Retry_After="9" * 4000),
    "/odd-retry-date": status(503, Retry_After="Thu, 01 Jan 99999999999999999999 00:00:00 GMT"),
    "/cookies": status(200, GOOD, Set_Cookie="a=b; Domain=.127.0.0.2; Path=/; " + "x" * 3000),
    **{f"/{number}": status(number) for number in (201, 300, 304, 400, 401, 403, 404, 407, 410, 418, 451)},
    **{f"/{number}": status(number) for number in (429, 500, 502, 503, 504, 599)},
}
