import asyncio
import gzip
import socket
import threading
import time
import tracemalloc
import zlib
from contextlib import AsyncExitStack

import msgspec
import pytest
from aiohttp.abc import AbstractResolver
from kept_bodies import HeapBody, KeptSource

from http_origin import HttpOrigin, answer
from limits import no_free_descriptors
from medialane.media import FetchLimits, MediaConfig
from medialane.media.http_cache import Freshness, Validators, url_digest
from medialane.types.errors import (
    EmptyMedia,
    InvalidImage,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaOverloaded,
    MediaTooLarge,
    MediaUrlForbidden,
    TooManyRedirects,
    Unavailable,
    UnsupportedUrlScheme,
    UpstreamFailed,
)
from medialane.types.hashing import content_hash
from waiting import eventually

CONFIG = MediaConfig(allowed_media_networks=("127.0.0.0/8",))
LIMITS = FetchLimits(max_bytes=100_000, timeout_s=10.0)
BODY = bytes(range(256)) * 100


class RecordedBody(HeapBody):
    """Remembers what was done to it. The first `finish` raises `error`, if there is one."""

    def __init__(self, log, error=None):
        super().__init__([])
        self.log, self.error = log, error

    def expect(self, num_bytes):
        self.log.append(("expect", num_bytes))

    def finish(self, content_hash):
        self.log.append(("finish", content_hash))
        if self.error is not None:
            raise self.error

    def abandon(self):
        self.log.append("abandon")


class Names(AbstractResolver):
    """A resolver with answers of its own: the next list of addresses for every look-up of a name."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        self.asked.append(host)
        answers = self._answers[host.replace(".", "_")]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            {
                "hostname": host,
                "host": a,
                "port": port,
                "family": socket.AF_INET6 if ":" in a else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for a in found
        ]

    async def close(self):
        pass


@pytest.fixture
async def source():
    source = KeptSource(CONFIG)
    yield source
    await source.close()


@pytest.fixture
async def canary():
    """Listens where nothing may be fetched: on an address that is not in the allowed network's config of a test."""
    async with HttpOrigin() as canary:
        yield canary


async def test_body_is_returned_with_its_validators(source, origin):
    origin.routes["/a"] = answer(200, BODY, etag='"1"', last_modified="Tue", cache_control="max-age=60")
    received = await source.get(origin.url("/a"), LIMITS)
    assert (received.data, received.content_hash) == (BODY, content_hash(BODY))
    assert received.freshness == Freshness(lifetime_s=60)
    assert received.validators == Validators(url_digest(origin.url("/a")), '"1"', "Tue")


async def test_request_headers_reveal_nothing_about_us(source, origin):
    origin.routes["/a"] = answer(200, BODY, set_cookie="a=b")
    await source.get(origin.url("/a"), LIMITS)
    await source.get(origin.url("/a"), LIMITS)
    assert set(origin.requests[1].headers) == {"host", "accept", "accept-encoding", "user-agent"}
    assert origin.requests[1].headers["accept-encoding"] == "identity"


async def test_connection_is_reused(source, origin):
    origin.routes["/a"] = answer(200, BODY)
    for _ in range(3):
        await source.get(origin.url("/a"), LIMITS)
    assert origin.num_connections == 1


async def test_not_modified(source, origin):
    origin.routes["/a"] = answer(304, cache_control="max-age=5", content_length=None)
    validators = Validators(url_digest(origin.url("/a")), '"1"', "Tue")
    received = await source.get(origin.url("/a"), LIMITS, validators)
    assert (received.content_hash, received.data) == (None, None)
    assert (received.validators, received.freshness.lifetime_s) == (validators, 5)
    assert origin.requests[0].headers["if-none-match"] == '"1"'
    assert origin.requests[0].headers["if-modified-since"] == "tue"


async def test_validators_are_sent_only_to_their_url(source, origin):
    origin.routes["/a"] = answer(302, location="/b")
    origin.routes["/b"] = answer(200, BODY, etag='"2"')
    received = await source.get(origin.url("/a"), LIMITS, Validators(url_digest(origin.url("/old")), '"1"', None))
    assert received.validators == Validators(url_digest(origin.url("/b")), '"2"', None)
    assert not any("if-none-match" in request.headers for request in origin.requests)


async def test_unsolicited_not_modified_is_a_failure(source, origin):
    origin.routes["/a"] = answer(304)
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


@pytest.mark.parametrize("status", [300, 304, 305, 400, 401, 403, 404, 410, 451])
async def test_error_status_is_reported(source, origin, status):
    """What an origin refuses is 422, as in vLLM."""
    origin.routes["/a"] = answer(status)
    error = MediaFetchFailed if status >= 400 else UpstreamFailed
    with pytest.raises(error, match=str(status)) as raised:
        await source.get(origin.url("/a"), LIMITS)
    assert raised.value.status == (422 if status >= 400 else 502)
    assert len(origin.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_failing_origin_is_tried_twice(source, origin, status):
    origin.routes["/a"] = answer(status, b"no")
    with pytest.raises(UpstreamFailed, match=str(status)):
        await source.get(origin.url("/a"), LIMITS)
    assert len(origin.requests) == 2


async def test_second_attempt_may_succeed(source, origin):
    async def once_busy(request, writer):
        busy = len(origin.requests) == 1
        await answer(503 if busy else 200, BODY, retry_after="1")(request, writer)

    origin.routes["/a"] = once_busy
    started = time.monotonic()
    assert (await source.get(origin.url("/a"), LIMITS)).data == BODY
    assert time.monotonic() - started >= 1.0


async def test_long_retry_after_is_not_waited_for(source, origin):
    origin.routes["/a"] = answer(503, b"no", retry_after="3")
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)
    assert len(origin.requests) == 1


async def test_server_without_free_sockets_is_not_the_clients_fault(source, origin):
    origin.routes["/a"] = answer(200, BODY)
    with no_free_descriptors(), pytest.raises(Unavailable):
        await source.get(origin.url("/a"), LIMITS)
    assert (await source.get(origin.url("/a"), LIMITS)).data == BODY


async def test_refused_connection(source):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UpstreamFailed) as raised:
        await source.get(f"http://127.0.0.1:{port}/", LIMITS)
    assert str(port) not in raised.value.message


async def test_unknown_host(source):
    with pytest.raises(UpstreamFailed):
        await source.get("http://no-such-host.invalid/", LIMITS)


async def test_https_to_a_plain_http_server_fails(source):
    async def write(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(write, "127.0.0.1", 0) as server:
        with pytest.raises(UpstreamFailed):
            await source.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/", LIMITS)


async def test_closed_connection_is_a_failure(source, origin):
    async def cut(request, writer):
        writer.transport.abort()
        raise ConnectionError

    origin.routes["/a"] = cut
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)
    assert len(origin.requests) >= 2


async def test_truncated_body_is_a_failure(source, origin):
    async def cut(request, writer):
        await answer(200, BODY, content_length=str(len(BODY) + 1))(request, writer)
        raise ConnectionError

    origin.routes["/a"] = cut
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


async def silent(request, writer):
    await asyncio.Event().wait()


async def slow_body(request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 90000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)  # time: the origin's rate


async def slow_headers(request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)  # time: the origin's rate


@pytest.mark.parametrize("answering", [silent, slow_body, slow_headers], ids=["silent", "body", "headers"])
async def test_slow_origin_times_out(source, origin, answering):
    origin.routes["/a"] = answering
    started = time.monotonic()
    with pytest.raises(MediaFetchTimeout):
        await source.get(origin.url("/a"), FetchLimits(100_000, 0.5))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("silent_s", [(5.3, 0), (0, 2.3)], ids=["at the start", "in the body"])
async def test_silence_within_the_limit_is_no_error(source, origin, silent_s):
    """A host may cut or transcode on demand; what has arrived is not refused for having been late."""

    async def write(request, writer):
        await asyncio.sleep(silent_s[0])  # time: the origin's silence
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + BODY[:1000])
        await asyncio.sleep(silent_s[1])  # time: the origin's silence
        writer.write(BODY[1000:5000])

    origin.routes["/a"] = write
    assert (await source.get(origin.url("/a"), LIMITS)).data == BODY[:5000]


class Crowd:
    """Fetches that do not end by themselves, in tasks."""

    def __init__(self, source):
        self.source, self.tasks = source, []

    def add(self, url, limits=LIMITS):
        self.tasks.append(asyncio.create_task(self.source.get(url, limits)))
        return self.tasks[-1]

    async def disperse(self):
        for task in self.tasks:
            task.cancel()
        return await asyncio.gather(*self.tasks, return_exceptions=True)


def config(**changes):
    return msgspec.structs.replace(CONFIG, **changes)


async def crowded(source, urls):
    crowd = Crowd(source)
    for url in urls:
        crowd.add(url)
        await asyncio.sleep(0)
    return crowd


@pytest.mark.parametrize("through", ["direct", "redirect"])
async def test_slow_hosts_delay_only_their_own(source, origin, through):
    origin.routes["/good"] = answer(200, BODY)
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(HttpOrigin({"/a": silent})) for _ in range(4)]
        for n, host in enumerate(slow):
            origin.routes[f"/to{n}"] = answer(302, location=host.url("/a"))
        urls = [host.url("/a") if through == "direct" else origin.url(f"/to{n}") for n, host in enumerate(slow)] * 40
        crowd = await crowded(source, urls)
        await eventually(lambda: sum(host.num_connections for host in slow) > 100)
        for _ in range(3):
            assert (await source.get(origin.url("/good"), FetchLimits(100_000, 2.0))).data == BODY
        await crowd.disperse()


async def test_names_of_one_address_are_one_host(origin):
    names = {f"name{n}": [["127.0.0.1"]] for n in range(40)}
    source = KeptSource(config(max_fetches=16, max_fetches_per_host=8), resolver=Names(**names))
    origin.routes["/good"] = answer(200, BODY)
    async with HttpOrigin({"/a": silent}) as slow:
        crowd = await crowded(source, [slow.url("/a", name) for name in names])
        await eventually(lambda: slow.num_connections == 8)
        assert (await source.get(origin.url("/good"), FetchLimits(100_000, 2.0))).data == BODY
        assert slow.num_connections == 8
        await crowd.disperse()
    await source.close()


async def test_who_finds_all_places_taken_is_told_so(origin):
    origin.routes["/a"] = answer(200, BODY)
    source = KeptSource(config(max_fetches=1, min_rate_bytes_per_s=0))
    async with HttpOrigin({"/a": silent}) as slow:
        crowd = await crowded(source, [slow.url("/a")])
        with pytest.raises(MediaOverloaded) as raised:
            await source.get(origin.url("/a"), FetchLimits(100_000, 0.3))
        assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (503, "media_overloaded", 1)
        assert origin.num_connections == 0
        await crowd.disperse()
        assert (await source.get(origin.url("/a"), FetchLimits(100_000, 2.0))).data == BODY
    await source.close()


async def test_slowest_host_loses_a_place_that_another_needs(origin):
    origin.routes["/a"] = answer(200, BODY)
    source = KeptSource(config(max_fetches=4, min_rate_grace_s=0.3))
    async with HttpOrigin({"/a": silent}) as patient, HttpOrigin({"/a": silent}) as slow:
        crowd = await crowded(source, [slow.url("/a")] * 4)
        await eventually(lambda: slow.num_connections == 3)
        one = await crowded(source, [patient.url("/a")])
        await eventually(lambda: patient.num_connections == 1)
        assert (await source.get(origin.url("/a"), LIMITS)).data == BODY
        assert [type(error) for error in await crowd.disperse()].count(MediaOverloaded) == 1
        assert [type(error) for error in await one.disperse()] == [asyncio.CancelledError]
    await source.close()


async def test_waiting_for_a_place_does_not_count_as_fetching(origin):
    async def write(request, writer):
        await asyncio.sleep(0.6)  # time: of each fetch
        await answer(200, BODY)(request, writer)

    origin.routes["/a"] = write
    source = KeptSource(config(max_fetches=1))
    crowd = await crowded(source, [])
    fetches = [crowd.add(origin.url("/a"), FetchLimits(100_000, 1.7)) for _ in range(3)]  # the last waits for 1.2 s
    assert [each.data for each in await asyncio.gather(*fetches)] == [BODY] * 3
    await source.close()


async def test_lookups_that_hang_delay_only_their_own(origin, monkeypatch):
    """A thread in getaddrinfo cannot be cancelled."""
    ended, hanging = threading.Event(), []
    system = socket.getaddrinfo

    def getaddrinfo(host, *more, **named):
        if host.endswith(".slow.test"):
            hanging.append(host)
            ended.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return system("127.0.0.1", *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    origin.routes["/good"] = answer(200, BODY)
    source = KeptSource(CONFIG)
    urls = [f"http://{name}.slow.test/" for n in range(50) for name in (f"a{n}", f"a{n}", "same")]
    crowd = await crowded(source, urls)
    await eventually(lambda: len(hanging) == CONFIG.max_fetches_per_host)
    await crowd.disperse()  # their threads go on
    good = source.get(origin.url("/good", "good.test"), FetchLimits(100_000, 2.0))
    assert (await good).data == BODY
    assert len(hanging) == len(set(hanging)) == CONFIG.max_fetches_per_host
    ended.set()
    await source.close()


async def test_declared_size_ends_a_fetch_before_its_body(source, origin):
    origin.routes["/a"] = answer(200, b"", content_length=str(10_000_000_000))
    with pytest.raises(MediaTooLarge):
        await source.get(origin.url("/a"), LIMITS)


async def test_endless_body_is_cut_off(source, origin):
    async def endless(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"2000\r\n" + bytes(0x2000) + b"\r\n")
            await writer.drain()

    origin.routes["/a"] = endless
    with pytest.raises(MediaTooLarge):
        await source.get(origin.url("/a"), LIMITS)


@pytest.mark.parametrize(("num_interim", "error"), [(3, None), (10_000, UpstreamFailed)])
async def test_interim_responses_are_limited(source, origin, num_interim, error):
    async def write(request, writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * num_interim)
        await answer(200, BODY)(request, writer)

    origin.routes["/a"] = write
    if error is None:
        assert (await source.get(origin.url("/a"), LIMITS)).data == BODY
        return
    with pytest.raises(error):
        await source.get(origin.url("/a"), LIMITS)


async def test_empty_body(source, origin):
    origin.routes["/a"] = answer(200)
    with pytest.raises(EmptyMedia):
        await source.get(origin.url("/a"), LIMITS)


ENCODED = {
    "gzip": gzip.compress(BODY),
    "GZIP": gzip.compress(BODY[:100]) + gzip.compress(BODY[100:]),
    "deflate": zlib.compress(BODY),
    "identity": BODY,
}


@pytest.mark.parametrize("coding", ENCODED)
async def test_content_coding_is_decoded(source, origin, coding):
    origin.routes["/a"] = answer(200, ENCODED[coding], content_encoding=coding)
    received = await source.get(origin.url("/a"), LIMITS)
    assert (received.data, received.content_hash) == (BODY, content_hash(BODY))


@pytest.mark.parametrize("coding", ["rot13", "gzip, gzip", "br", "zstd"])
async def test_other_content_codings_are_rejected(source, origin, coding):
    origin.routes["/a"] = answer(200, gzip.compress(BODY), content_encoding=coding)
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


async def test_body_that_is_not_in_its_coding_is_rejected(source, origin):
    origin.routes["/a"] = answer(200, BODY, content_encoding="gzip")
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


async def test_decoded_size_is_limited(source, origin):
    """100 MB in 100 KB: it ends after the limit, in bounded memory."""
    body = await asyncio.to_thread(gzip.compress, bytes(100_000_000))
    origin.routes["/a"] = answer(200, body, content_encoding="gzip")
    tracemalloc.start()
    with pytest.raises(MediaTooLarge):
        await source.get(origin.url("/a"), FetchLimits(2_000_000, 10.0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (201, {}),
        (203, {}),
        (206, {}),
        (206, {"content_range": f"bytes 0-{len(BODY) - 1}/{len(BODY)}"}),
        (206, {"content_range": f"bytes 0-{len(BODY) - 1}/*"}),
    ],
)
async def test_any_success_with_a_body_is_served(source, origin, status, headers):
    origin.routes["/a"] = answer(status, BODY, cache_control="max-age=60", **headers)
    received = await source.get(origin.url("/a"), LIMITS)
    assert (received.data, received.freshness.storable) == (BODY, False)


@pytest.mark.parametrize("content_range", ["bytes 0-99/100000", "bytes 5-25604/*", "bytes */100", "items 0-1/2", "x"])
async def test_a_part_is_not_served_as_the_whole(source, origin, content_range):
    origin.routes["/a"] = answer(206, BODY, content_range=content_range)
    with pytest.raises(UpstreamFailed, match="part"):
        await source.get(origin.url("/a"), LIMITS)


async def test_spaces_and_unicode_are_percent_encoded(source, origin):
    origin.routes["/a%20b/b%C3%BC.png?c=%2F%20d"] = answer(302, location="/ü%2F e?f=%2f")
    origin.routes["/%C3%BC%2F%20e?f=%2f"] = answer(200, BODY)
    assert (await source.get(origin.url("/a b/bü.png?c=%2F d"), LIMITS)).data == BODY


@pytest.mark.parametrize("coding", ["gzip, chunked", "rot13"])
async def test_transfer_coding_is_rejected(source, origin, coding):
    origin.routes["/a"] = answer(200, b"1\r\nx\r\n0\r\n\r\n", transfer_encoding=coding, content_length=None)
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


@pytest.mark.parametrize("headers", ["x: " + "y" * 1_000_000, "\r\n".join(f"x{n}: y" for n in range(10_000)), "junk"])
async def test_oversized_headers_are_rejected(source, origin, headers):
    async def write(request, writer):
        writer.write(f"HTTP/1.1 200 OK\r\n{headers}\r\ncontent-length: 1\r\n\r\nx".encode())
        await writer.drain()

    origin.routes["/a"] = write
    with pytest.raises(UpstreamFailed):
        await source.get(origin.url("/a"), LIMITS)


async def test_redirects_are_followed(source, origin):
    origin.routes["/a"] = answer(301, location="/b", cache_control="max-age=7")
    origin.routes["/b"] = answer(307, location=origin.url("/c"), cache_control="max-age=9")
    origin.routes["/c"] = answer(200, BODY, cache_control="max-age=60")
    received = await source.get(origin.url("/a"), LIMITS)
    assert received.data == BODY
    assert received.freshness.lifetime_s == 7


async def test_too_many_redirects(source, origin):
    origin.routes["/a"] = answer(302, location="/a")
    with pytest.raises(TooManyRedirects):
        await source.get(origin.url("/a"), LIMITS)
    assert len(origin.requests) == 4


@pytest.mark.parametrize("location", ["file:///etc/passwd", "data:image/png;base64,AAAA"])
async def test_redirect_to_another_scheme(source, origin, location):
    origin.routes["/a"] = answer(302, location=location)
    with pytest.raises(UnsupportedUrlScheme):
        await source.get(origin.url("/a"), LIMITS)


async def test_redirect_to_a_forbidden_address_is_never_contacted(origin, canary):
    source = KeptSource(MediaConfig(allowed_media_networks=("127.0.0.2/32",)), resolver=Names(origin=[["127.0.0.1"]]))
    guarded = KeptSource(CONFIG, resolver=Names(inside=[["10.0.0.1"]], mixed=[["127.0.0.1", "10.0.0.1"]]))
    with pytest.raises(MediaUrlForbidden):
        await source.get(origin.url("/a"), LIMITS)
    for host in ("inside", "mixed"):
        origin.routes["/a"] = answer(302, location=canary.url("/", host))
        with pytest.raises(MediaUrlForbidden):
            await guarded.get(origin.url("/a"), LIMITS)
    assert canary.num_connections == 0
    await source.close()
    await guarded.close()


async def test_name_resolving_to_a_private_address_is_forbidden(origin, canary):
    names = Names(evil=[["127.0.0.1"]], mixed=[["8.8.8.8", "::1"]])
    source = KeptSource(MediaConfig(), resolver=names)
    for host in ("evil", "mixed"):
        with pytest.raises(MediaUrlForbidden):
            await source.get(f"http://{host}/", LIMITS)
    assert names.asked == ["evil", "mixed"]
    await source.close()


async def test_name_that_changes_its_address_is_checked_each_time(origin, canary):
    names = Names(rebinding=[["127.0.0.1"], ["127.0.0.5"]])
    source = KeptSource(MediaConfig(allowed_media_networks=("127.0.0.1/32",)), resolver=names)

    async def once(request, writer):
        await answer(200, BODY, connection="close")(request, writer)
        raise ConnectionError

    origin.routes["/a"] = once
    assert (await source.get(origin.url("/a", "rebinding"), LIMITS)).data == BODY
    with pytest.raises(MediaUrlForbidden):
        await source.get(origin.url("/a", "rebinding"), LIMITS)
    await source.close()


async def test_port_of_a_public_name_is_checked():
    source = KeptSource(MediaConfig(), resolver=Names(public=[["8.8.8.8"]]))
    with pytest.raises(MediaUrlForbidden, match="port"):
        await source.get("http://public:6379/", LIMITS)
    await source.close()


async def test_rejection_is_not_retried(origin):
    names = Names(evil=[["10.0.0.1"]])
    source = KeptSource(MediaConfig(), resolver=names)
    with pytest.raises(MediaUrlForbidden):
        await source.get("http://evil/", LIMITS)
    assert len(names.asked) == 1
    await source.close()


async def test_cancelled_fetch_closes_its_connection(source, origin):
    closed = asyncio.Event()

    async def until_closed(request, writer):
        try:
            while True:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)  # time: between writes, the only way to notice a closed connection
        except ConnectionError:
            closed.set()
            raise

    origin.routes["/a"] = until_closed
    fetching = asyncio.create_task(source.get(origin.url("/a"), LIMITS))
    await origin.asked()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    async with asyncio.timeout(2):
        await closed.wait()


async def test_body_writer_receives_length_and_hash(source, origin):
    log = []
    origin.routes["/a"] = answer(200, BODY)
    received = await source.get(origin.url("/a"), LIMITS, open_body=lambda: RecordedBody(log))
    assert (received.content_hash, received.data) == (content_hash(BODY), None)
    assert log == [("expect", len(BODY)), ("finish", content_hash(BODY))]


async def test_no_body_is_opened_for_responses_without_one(source, origin):
    origin.routes["/moved"] = answer(302, location="/gone", body=b"elsewhere")
    origin.routes["/gone"] = answer(404, b"not here")
    with pytest.raises(MediaFetchFailed):
        await source.get(origin.url("/moved"), LIMITS, open_body=lambda: pytest.fail("opened"))
    origin.routes["/large"] = answer(200, b"", content_length="10000000")
    with pytest.raises(MediaTooLarge):
        await source.get(origin.url("/large"), LIMITS, open_body=lambda: pytest.fail("opened"))


async def cut_short(request, writer):
    await answer(200, BODY, content_length=str(len(BODY) + 1))(request, writer)
    raise ConnectionError


async def too_long(request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(20):
        writer.write(b"2000\r\n" + bytes(0x2000) + b"\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("answering", "error"),
    [
        (cut_short, UpstreamFailed),
        (too_long, MediaTooLarge),
        (slow_body, MediaFetchTimeout),
        (answer(200), EmptyMedia),
    ],
    ids=["cut", "long", "slow", "empty"],
)
async def test_failing_body_is_abandoned(source, origin, answering, error):
    log = []
    origin.routes["/a"] = answering
    with pytest.raises(error):
        await source.get(origin.url("/a"), FetchLimits(100_000, 1.0), open_body=lambda: RecordedBody(log))
    assert log[1:] == ["abandon"]


async def test_body_rejected_at_its_end_is_abandoned_and_not_refetched(source, origin):
    log = []
    origin.routes["/a"] = answer(200, BODY)
    with pytest.raises(InvalidImage):
        await source.get(origin.url("/a"), LIMITS, open_body=lambda: RecordedBody(log, InvalidImage("no image")))
    assert log[1:] == [("finish", content_hash(BODY)), "abandon"]
    assert len(origin.requests) == 1


async def test_body_of_a_cancelled_fetch_is_abandoned(source, origin):
    log = []
    origin.routes["/a"] = slow_body
    fetching = asyncio.create_task(source.get(origin.url("/a"), LIMITS, open_body=lambda: RecordedBody(log)))
    await eventually(lambda: log)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert log[1:] == ["abandon"]
