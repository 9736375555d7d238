"""Media that clients send once, and refer to by their hash: in all APIs, with plain vLLM's outputs."""

import asyncio
import io
import json
from urllib.parse import urlsplit

import pytest
from openai_http import CHAT, OpenAiHttp, assert_same, chat, data_url, image, photo, text

from audio_maker import tone
from video_clips import clip

pytestmark = pytest.mark.vllm

ASK = text("Describe the picture.")
MEDIA = "/medialane/v1/media"

#: What was sent, and is still kept.
kept = []


async def call(client, method, path, data=None, **headers):
    """Return status, JSON and headers. `data` may be an iterator of chunks."""
    async with (
        client.session(**headers) as session,
        session.request(method, client.base_url + path, data=data) as response,
    ):
        body = await response.json() if response.content_type == "application/json" and method != "HEAD" else None
        return response.status, body, response.headers


async def sent(client, data, query="", **headers):
    status, media, _ = await call(client, "PUT", MEDIA + query, io.BytesIO(data), **headers)
    assert status == 200, media
    kept.append((client, media))
    return media


@pytest.fixture(autouse=True)
async def _nothing_kept(ours, other):
    """Other tests count what the store holds."""
    yield
    while kept:
        client, media = kept.pop()
        await call(client, "DELETE", f"{MEDIA}/{media['hash']}")


def reference(media):
    return f"medialane:media/{media['hash']}"


@pytest.fixture
def other(serve):
    """A client with another key."""
    return OpenAiHttp(serve.base_url, serve.model, api_key="another")


async def test_chat_by_hash_gives_the_tokens_of_the_data_url(ours, plain):
    right = await plain.succeed(chat(image(data_url(photo(640))), ASK))
    media = await sent(ours, photo(640))
    assert media["size"] == {"bytes": len(photo(640)), "width": 512, "height": 384}
    assert (media["modality"], media["duration"]) == ("image", None)
    for _ in range(2):
        assert_same((await ours.succeed(chat(image(reference(media)), ASK))).json, right.json)
    assert (await ours.succeed(chat(image(reference(media)), ASK))).cache == "hit"
    usage = (await ours.succeed(chat(image(reference(media)), ASK))).json["usage"]
    assert media["num_tokens"] <= usage["prompt_tokens"]


async def test_media_of_another_key_are_unknown(ours, other):
    media = await sent(ours, photo(641))
    answer = await other.post(chat(ASK, image(reference(media))))
    assert (answer.status, answer.error["code"]) == (404, "unknown_media")
    assert answer.error["param"] == "messages[0].content[1].image_url"
    assert (await call(other, "GET", f"{MEDIA}/{media['hash']}"))[0] == 404
    assert (await call(other, "DELETE", f"{MEDIA}/{media['hash']}"))[0] == 404
    assert (await sent(other, photo(641)))["hash"] != media["hash"]
    await ours.succeed(chat(image(reference(media)), ASK))


@pytest.mark.parametrize("length", ["declared", "chunked"])
async def test_lease_lives_until_it_is_deleted(ours, length):
    async def chunks():
        for start in range(0, len(photo(642)), 10_000):
            yield photo(642)[start : start + 10_000]

    status, media, _ = await call(ours, "PUT", f"{MEDIA}?ttl=60", chunks() if length == "chunked" else photo(642))
    assert status == 200, media
    path = f"{MEDIA}/{media['hash']}"
    assert (await call(ours, "GET", path))[1].items() >= {"hash": media["hash"], "modality": "image"}.items()
    assert (await call(ours, "HEAD", path))[0] == 200
    assert (await call(ours, "POST", f"{path}?ttl=600"))[1]["expires"] > media["expires"] + 500
    assert (await call(ours, "DELETE", path))[1] == {"hash": media["hash"], "deleted": True}
    for method in ("GET", "HEAD", "POST", "DELETE"):
        assert (await call(ours, method, path))[0] == 404
    answer = await ours.post(chat(image(reference(media)), ASK))
    assert (answer.status, answer.error["code"]) == (404, "unknown_media")


async def test_uuid_of_sent_media_stands_for_them(ours):
    media = await sent(ours, photo(643), "?uuid=sent-643")
    right = await ours.succeed(chat(image(reference(media)), ASK))
    named = {"type": "image_url", "image_url": None, "uuid": "sent-643"}
    assert_same((await ours.succeed(chat(named, ASK))).json, right.json)


async def test_all_apis_take_the_reference(ours):
    media = await sent(ours, photo(644))
    url, limits = reference(media), {"temperature": 0}
    asked = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]
    await ours.succeed({"input": [{"role": "user", "content": asked}], **limits}, "/v1/responses")
    for source in ({"type": "url", "url": url}, {"type": "base64", "media_type": "image/jpeg", "data": url}):
        content = [{"type": "image", "source": source}, ASK]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **limits}
        await ours.succeed(body, "/v1/messages")
    rendered = await ours.succeed(chat(image(url), ASK, mm_payload="none"), f"{CHAT}/render")
    right = await ours.succeed(chat(image(data_url(photo(644))), ASK, mm_payload="none"), f"{CHAT}/render")
    assert rendered.json["token_ids"] == right.json["token_ids"]
    assert rendered.json["features"] == right.json["features"]


async def test_video_is_measured_and_used(ours, plain):
    data = clip(75, size=(168, 120))

    def asked(url):
        return chat({"type": "video_url", "video_url": {"url": url}}, ASK)

    media = await sent(ours, data)
    assert media["modality"] == "video"
    right = await plain.succeed(asked(data_url(data, "video/mp4")))
    assert_same((await ours.succeed(asked(reference(media)))).json, right.json)


async def test_audio_is_measured(ours):
    media = await sent(ours, tone(440, 1.5))
    assert (media["modality"], media["duration"], media["num_tokens"]) == ("audio", 1.5, None)


@pytest.mark.parametrize(
    ("query", "data", "headers", "status", "code", "param"),
    [
        ("?ttl=1e300", b"x", {}, 400, "invalid_request", "ttl"),
        ("?ttl=nan", b"x", {}, 400, "invalid_request", "ttl"),
        ("?ttl=x", b"x", {}, 400, "invalid_request", "ttl"),
        ("?what=1", b"x", {}, 400, "invalid_request", "what"),
        ("?uuid=", b"x", {}, 400, "invalid_request", "uuid"),
        ("", b"", {}, 400, "empty_media", None),
        ("", b"no media", {}, 400, "invalid_upload", None),
        ("", b"%!PS-Adobe-3.0", {}, 415, "unsupported_media_type", None),
        ("", photo(645)[:20], {"Content-Type": "image/jpeg"}, 400, "invalid_image", None),
        ("", photo(645), {"Content-Type": "video/mp4"}, 415, "unsupported_media_type", None),
        ("", b"x", {"Content-Length": str(1 << 40)}, 413, "body_too_large", None),
    ],
)
async def test_bad_upload_names_what_is_wrong(ours, query, data, headers, status, code, param):
    got, answer, _ = await call(ours, "PUT", MEDIA + query, io.BytesIO(data), **headers)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param), answer


@pytest.mark.parametrize(("query", "first"), [("?ttl=0", b"HTTP/1.1 400"), ("", b"HTTP/1.1 100 Continue")])
async def test_client_that_expects_100_sends_only_what_is_accepted(ours, query, first):
    address = urlsplit(ours.base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"PUT {MEDIA}{query} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo(646))}\r\nExpect: 100-continue\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n")
    assert (await reader.readline()).startswith(first)
    if first.endswith(b"Continue"):
        writer.write(photo(646))
        media = json.loads((await reader.read()).rpartition(b"\r\n")[2])
        kept.append((ours, media))
        assert media["size"]["bytes"] == len(photo(646))
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "name", ["media/" + "g" * 64, "media/" + "A" * 64, "media/ab", "media/", "feature/" + "a" * 64]
)
async def test_malformed_reference_is_refused(ours, name):
    answer = await ours.post(chat(image(f"medialane:{name}"), ASK))
    assert (answer.status, answer.error["code"]) == (400, "invalid_media_url")
    assert answer.error["param"] == "messages[0].content[0].image_url"


async def test_malformed_hash_in_the_path_is_refused(ours):
    for method in ("GET", "POST", "DELETE"):
        status, answer, _ = await call(ours, method, f"{MEDIA}/{'A' * 64}")
        assert (status, answer["error"]["param"]) == (400, "hash")
