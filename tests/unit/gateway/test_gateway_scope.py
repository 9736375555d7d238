"""One scope per request: its resources are released with it, once, in reverse order."""

import asyncio

import pytest

from medialane.gateway import current_scope, open_scope
from medialane.gateway.intake import ExtractedMedia
from medialane.types.errors import (
    ArenaFull,
    ClientDisconnected,
    InvalidBody,
    InvalidImage,
    InvalidMediaUrl,
    WorkerDraining,
)
from medialane.types.media import MediaRef
from waiting import iterations


class Resource:
    def __init__(self, log, name):
        self._log, self._name = log, name

    def release(self):
        self._log.append(self._name)


def test_resources_are_released_once_in_reverse_order():
    log = []
    with open_scope() as scope:
        for name in "abc":
            scope.defer(Resource(log, name).release)
        scope.close()
    assert log == ["c", "b", "a"]


def test_resource_that_is_released_early_is_not_released_again():
    log, early = [], []
    with open_scope() as scope:
        resources = [Resource(log, name) for name in "abc"]
        for resource in resources:
            scope.defer(resource.release)
        scope.release(resources[1].release)
        early += log
        scope.release(Resource(log, "d").release)
    assert (early, log) == (["b"], ["b", "d", "c", "a"])


@pytest.mark.parametrize("has_own_cache", [False, True])
def test_text_is_found_by_requests_of_the_owner_with_the_same_salt(has_own_cache):
    with open_scope() as scope:
        scope.has_own_cache = has_own_cache
        salts = []
        for client, cache_salt in (("a", None), ("b", None), ("a", "x"), ("a", None)):
            scope.client, scope.extracted = client, ExtractedMedia(text_bytes=9, cache_salt=cache_salt)
            salts.append(scope.text_salt)
        assert len(set(salts)) == 2 + has_own_cache
        assert salts[0] == salts[3] != salts[2]
        for extracted in (ExtractedMedia(), ExtractedMedia(text_bytes=9, parse_error="no JSON")):
            scope.extracted = extracted
            assert scope.text_salt is None


def test_late_resource_is_released_immediately():
    log = []
    with open_scope() as scope:
        pass
    scope.defer(Resource(log, "late").release)
    assert log == ["late"]


def test_failing_release_does_not_prevent_others():
    log = []

    class Failing:
        def release(self):
            raise RuntimeError("released before")

    def request():
        with open_scope() as scope:
            for resource in (Resource(log, "a"), Failing(), Resource(log, "b")):
                scope.defer(resource.release)

    with pytest.raises(RuntimeError):
        request()
    assert log == ["b", "a"]


def test_scope_closes_when_the_request_fails():
    log = []

    def request():
        with open_scope() as scope:
            scope.defer(Resource(log, "a").release)
            raise KeyError

    with pytest.raises(KeyError):
        request()
    assert log == ["a"]


def referring(text, references):
    """Return `text` with a reference of this request instead of `medialane:`."""
    return text.replace("medialane:", references.prefix)


def test_media_of_the_request_do_not_outlive_it():
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((MediaRef("image", "p", data=b"a"),))
    assert scope.extracted.refs == ()
    with pytest.raises(InvalidMediaUrl):
        scope.resolve(scope.references.text(0))


@pytest.mark.parametrize("url", ["data:audio/wav;base64,medialane:0", "data:x;y,z;base64,medialane:0"])
def test_reference_parsed_by_vllm_as_base64_is_resolved(url):
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((MediaRef("audio", "p", data=b"a"),))
        assert scope.resolve(referring(url, scope.references)).data == b"a"


@pytest.mark.parametrize(
    "url",
    [
        "medialane:1",
        "medialane:-1",
        "medialane:",
        "medialane:0x0",
        "medialane:²",
        "0",
        "http://a/",
        "http://a/;base64,medialane:0",
        "data:audio/wav,medialane:0",
        "data:audio/wav;base64,",
        "data:audio/wav;base64,UklGRg==",
    ],
)
def test_url_not_written_by_intake_is_rejected(url):
    with open_scope() as scope:
        scope.extracted = ExtractedMedia((MediaRef("image", "p", data=b"a"),))
        assert scope.resolve(scope.references.text(0)).data == b"a"
        with pytest.raises(InvalidMediaUrl):
            scope.resolve(referring(url, scope.references))


def test_references_of_one_request_are_unknown_in_another():
    with open_scope() as first, open_scope() as second:
        first.extracted = second.extracted = ExtractedMedia((MediaRef("image", "p", data=b"a"),))
        for text in (first.references.text(0), "medialane:0", "medialane::0"):
            with pytest.raises(InvalidMediaUrl, match="not accepted at this place"):
                second.resolve(text)


def test_first_error_is_reported_as_the_cause():
    with open_scope() as scope:
        assert scope.error_code is None
        scope.fail(InvalidImage("broken"))
        scope.fail(ArenaFull("follows"))
        assert scope.error_code == "invalid_image"


def test_no_scope_exists_outside_a_request():
    with open_scope():
        current_scope()
    with pytest.raises(LookupError):
        current_scope()


async def test_tasks_belong_to_the_scope_of_their_request():
    async def found():
        await asyncio.sleep(0)
        return current_scope()

    async def one():
        with open_scope() as scope:
            return await asyncio.create_task(found()) is scope

    assert await asyncio.gather(one(), one()) == [True, True]


def test_unreadable_body_is_reported_as_the_cause_of_media_errors():
    with open_scope() as scope:
        scope.extracted = ExtractedMedia(parse_error="Invalid UTF-8")
        with pytest.raises(InvalidBody, match="Invalid UTF-8"):
            scope.resolve("https://a/b.png")


async def waiting(scope):
    async with scope.connected():
        await asyncio.Event().wait()


async def test_disconnect_ends_every_wait_and_releases_at_once():
    log = []
    with open_scope() as scope:
        scope.defer(Resource(log, "held").release)
        waits = [asyncio.create_task(waiting(scope)) for _ in range(2)]
        await iterations(2)
        scope.disconnect()
        assert log == ["held"]
        assert [type(result) for result in await asyncio.gather(*waits, return_exceptions=True)] == [
            ClientDisconnected,
            ClientDisconnected,
        ]
    assert log == ["held"]


async def test_request_that_is_given_up_may_be_given_up_again_while_a_wait_ends():
    """As when a drain runs out of time, and the client leaves meanwhile."""
    may_end = asyncio.Event()

    async def ending_slowly():
        async with scope.connected():
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()

    with open_scope() as scope:
        waits = [asyncio.create_task(ending_slowly()) for _ in range(2)]
        await iterations(2)
        scope.give_up(WorkerDraining("the gateway stops"))
        await iterations(2)
        scope.give_up(WorkerDraining("the gateway stops"))
        scope.disconnect()
        may_end.set()
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(result) for result in ended] == [ClientDisconnected, ClientDisconnected]


async def test_nothing_is_waited_for_after_the_disconnect():
    with open_scope() as scope:
        scope.disconnect()
        with pytest.raises(ClientDisconnected):
            await waiting(scope)


async def test_cancelled_wait_is_no_disconnect():
    with open_scope() as scope:
        wait = asyncio.create_task(waiting(scope))
        await iterations(2)
        scope.disconnect()
        wait.cancel()
        await asyncio.wait([wait])
        assert wait.cancelled()


async def test_timeout_in_a_wait_is_no_disconnect():
    with open_scope() as scope, pytest.raises(TimeoutError):
        async with scope.connected():
            raise TimeoutError


async def test_error_after_the_disconnect_is_not_that_of_the_request():
    with open_scope() as scope:
        scope.disconnect()
        scope.fail(ArenaFull("full"))
        assert scope.failure is None
