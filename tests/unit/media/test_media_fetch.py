import asyncio

import msgspec
import pytest
from kept_bodies import Fetched, KeptFetcher

from http_origin import answer
from kept_names import KeptNames
from medialane.media import MediaConfig
from medialane.types.errors import (
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaUrlForbidden,
    UnsupportedUrlScheme,
)
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef

CONFIG = MediaConfig(allowed_media_networks=("127.0.0.0/8",), max_fresh_s=1000.0)
BODY = b"body" * 1000
OTHER = b"other" * 1000


@pytest.fixture
async def fetcher(clock):
    async with KeptFetcher(CONFIG, clock=clock) as fetcher:
        yield fetcher


def image(url: str, salt: str = "") -> MediaRef:
    return MediaRef("image", "messages[0].content[0].image_url", url=url, salt=salt)


async def test_bytes_are_fetched_with_their_hash(fetcher, origin):
    origin.routes["/a"] = answer(200, BODY)
    fetched = await fetcher.fetch(image(origin.url("/a")))
    assert (fetched.content_hash, bytes(fetched.data)) == (content_hash(BODY), BODY)


async def test_origin_without_cache_headers_is_queried_each_time(fetcher, origin):
    origin.routes["/a"] = answer(200, BODY)
    for _ in range(2):
        assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY
    assert len(origin.requests) == 2


async def test_fresh_content_needs_no_request(fetcher, origin, clock):
    origin.routes["/a"] = answer(200, BODY, cache_control="max-age=60")
    await fetcher.fetch(image(origin.url("/a")))
    clock.now += 59
    assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(BODY), None)
    clock.now += 2
    assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY
    assert len(origin.requests) == 2


async def test_freshness_is_capped_by_the_setting(fetcher, origin, clock):
    origin.routes["/a"] = answer(200, BODY, cache_control="max-age=999999999")
    await fetcher.fetch(image(origin.url("/a")))
    clock.now += 1001
    assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY


async def test_tenants_do_not_share_urls(fetcher, origin):
    origin.routes["/a"] = answer(200, BODY, cache_control="max-age=60")
    await fetcher.fetch(image(origin.url("/a"), salt="one"))
    assert (await fetcher.fetch(image(origin.url("/a"), salt="two"))).data == BODY


async def test_needed_bytes_are_fetched_even_if_the_hash_is_known(fetcher, origin):
    origin.routes["/a"] = answer(200, BODY, cache_control="max-age=60", etag='"1"')
    await fetcher.fetch(image(origin.url("/a")))
    origin.routes["/a"] = answer(200, OTHER, cache_control="max-age=60", etag='"2"')
    fetched = await fetcher.fetch(image(origin.url("/a")), need_data=True)
    assert (fetched.content_hash, fetched.data) == (content_hash(OTHER), OTHER)
    assert "if-none-match" not in origin.requests[1].headers
    assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(OTHER), None)


def revalidating(body: bytes, etag: str, **headers: str):
    async def write(request, writer):
        if request.headers.get("if-none-match") == etag:
            await answer(304, content_length=None, **headers)(request, writer)
        else:
            await answer(200, body, etag=etag, **headers)(request, writer)

    return write


async def test_stale_content_is_revalidated(fetcher, origin):
    origin.routes["/a"] = revalidating(BODY, '"1"')
    assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY
    for _ in range(2):
        assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(BODY), None)
    assert len(origin.requests) == 3


async def test_changed_content_is_fetched(fetcher, origin):
    origin.routes["/a"] = revalidating(BODY, '"1"')
    await fetcher.fetch(image(origin.url("/a")))
    origin.routes["/a"] = revalidating(OTHER, '"2"')
    assert (await fetcher.fetch(image(origin.url("/a")))).data == OTHER
    assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(OTHER), None)


async def test_revalidation_renews_freshness(fetcher, origin, clock):
    origin.routes["/a"] = revalidating(BODY, '"1"', cache_control="max-age=60")
    for _ in range(3):
        await fetcher.fetch(image(origin.url("/a")))
        clock.now += 40
    assert len(origin.requests) == 2


async def test_not_modified_without_cache_headers_keeps_the_lifetime(fetcher, origin, clock):
    async def write(request, writer):
        again = "if-none-match" in request.headers
        respond = (
            answer(304, content_length=None) if again else answer(200, BODY, etag='"1"', cache_control="max-age=9")
        )
        await respond(request, writer)

    origin.routes["/a"] = write
    for _ in range(3):
        await fetcher.fetch(image(origin.url("/a")))
        clock.now += 5
    assert len(origin.requests) == 2


async def test_no_store_is_not_cached(fetcher, origin):
    origin.routes["/a"] = revalidating(BODY, '"1"', cache_control="max-age=60")
    await fetcher.fetch(image(origin.url("/a")))
    origin.routes["/a"] = answer(200, BODY, etag='"1"', cache_control="no-store")
    await fetcher.fetch(image(origin.url("/a")), need_data=True)
    assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY
    assert "if-none-match" not in origin.requests[-1].headers


async def test_temporary_redirect_is_followed_again(fetcher, origin):
    origin.routes["/a"] = answer(302, location="/b")
    origin.routes["/b"] = revalidating(BODY, '"1"', cache_control="max-age=60")
    await fetcher.fetch(image(origin.url("/a")))
    assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(BODY), None)
    assert [request.path for request in origin.requests] == ["/a", "/b", "/a", "/b"]
    origin.routes["/a"] = answer(302, location="/c")
    origin.routes["/c"] = revalidating(OTHER, '"1"')
    assert (await fetcher.fetch(image(origin.url("/a")))).data == OTHER


@pytest.fixture
def gate():
    return asyncio.Event()


@pytest.fixture
def held(origin, gate):
    async def write(request, writer):
        await gate.wait()
        await answer(200, BODY)(request, writer)

    origin.routes["/a"] = write
    return image(origin.url("/a"))


async def test_concurrent_callers_share_one_fetch(fetcher, origin, gate, held):
    fetching = [asyncio.create_task(fetcher.fetch(held)) for _ in range(5)]
    await origin.asked()
    gate.set()
    fetched = await asyncio.gather(*fetching)
    assert {id(f.data) for f in fetched} == {id(fetched[0].data)}
    assert len(origin.requests) == 1


async def test_cancelled_caller_does_not_stop_the_fetch_for_others(fetcher, origin, gate, held):
    first, second = (asyncio.create_task(fetcher.fetch(held)) for _ in range(2))
    await origin.asked()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    assert (await second).data == BODY
    assert len(origin.requests) == 1


async def test_last_cancelled_caller_stops_the_fetch(fetcher, origin, gate, held):
    fetching = [asyncio.create_task(fetcher.fetch(held)) for _ in range(2)]
    await origin.asked()
    for task in fetching:
        task.cancel()
    await asyncio.gather(*fetching, return_exceptions=True)
    gate.set()
    assert (await fetcher.fetch(held)).data == BODY
    assert len(origin.requests) == 2


async def test_fetch_times_out(held):
    async with KeptFetcher(msgspec.structs.replace(CONFIG, image_fetch_timeout_s=0.3)) as fetcher:
        with pytest.raises(MediaFetchTimeout):
            await fetcher.fetch(held)


async def test_failure_reaches_every_caller_and_is_not_cached(fetcher, origin):
    fetching = [fetcher.fetch(image(origin.url("/a"))) for _ in range(3)]
    errors = await asyncio.gather(*fetching, return_exceptions=True)
    assert [type(error) for error in errors] == [MediaFetchFailed] * 3
    origin.routes["/a"] = answer(200, BODY)
    assert (await fetcher.fetch(image(origin.url("/a")))).data == BODY


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://a/b", UnsupportedUrlScheme),
        ("http://10.0.0.1/", MediaUrlForbidden),
        ("file:///etc/passwd", MediaUrlForbidden),
    ],
)
async def test_forbidden_urls_are_rejected(fetcher, url, error):
    with pytest.raises(error):
        await fetcher.fetch(image(url))


async def test_file_below_the_allowed_folder_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(BODY)
    async with KeptFetcher(MediaConfig(allowed_local_media_path=str(tmp_path))) as fetcher:
        assert await fetcher.fetch(image(f"FILE://{tmp_path}/a.png")) == Fetched(content_hash(BODY), BODY)


async def test_next_process_neither_fetches_what_is_fresh_nor_trusts_what_is_stale(origin, clock):
    kept = KeptNames()
    origin.routes["/a"] = answer(200, BODY, cache_control="max-age=60", etag='"1"')
    async with KeptFetcher(CONFIG, clock=clock, records=kept) as fetcher:
        await fetcher.fetch(image(origin.url("/a")))
    assert not any(b"127.0.0.1" in key + payload for key, payload in kept.items())
    clock.now += 59
    async with KeptFetcher(CONFIG, clock=clock, records=kept) as fetcher:
        assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(BODY), None)
        assert (await fetcher.fetch(image(origin.url("/a"), salt="tenant"))).data == BODY
        clock.now += 2
        origin.routes["/a"] = answer(304, content_length=None)
        assert await fetcher.fetch(image(origin.url("/a"))) == Fetched(content_hash(BODY), None)
        assert origin.requests[-1].headers["if-none-match"] == '"1"'
        origin.routes["/a"] = answer(200, OTHER, cache_control="no-store")
        clock.now += 61
        await fetcher.fetch(image(origin.url("/a")))
    async with KeptFetcher(CONFIG, clock=clock, records=kept) as fetcher:
        assert (await fetcher.fetch(image(origin.url("/a")))).content_hash == content_hash(OTHER)
        assert "if-none-match" not in origin.requests[-1].headers


async def test_caller_who_joins_a_fetch_has_its_own_time(origin):
    """The first request of the origin hangs; those after it are answered."""

    async def first_hangs(request, writer):
        if len(origin.requests) == 1:
            await asyncio.Event().wait()
        await answer(200, BODY)(request, writer)

    origin.routes["/a"] = first_hangs
    async with KeptFetcher(msgspec.structs.replace(CONFIG, image_fetch_timeout_s=1.0)) as fetcher:
        first = asyncio.create_task(fetcher.fetch(image(origin.url("/a"))))
        await origin.asked()
        others = [asyncio.create_task(fetcher.fetch(image(origin.url("/a")))) for _ in range(3)]
        assert {found.content_hash for found in await asyncio.gather(*others)} == {content_hash(BODY)}
        with pytest.raises(MediaFetchTimeout):
            await first
    assert len(origin.requests) == 2
