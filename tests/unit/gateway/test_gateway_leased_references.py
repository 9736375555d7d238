"""References to media that were sent once, in the bodies of all APIs: whose they are, and what is none."""

import json

import pytest

from medialane.gateway import References
from medialane.gateway.intake import extract
from medialane.media import MediaConfig
from medialane.types.errors import InvalidMediaUrl
from medialane.types.media_lease import media_hash

URL = f"medialane:media/{media_hash(owner='tenant:search', salt='', content='a' * 64)}"


def message(*parts):
    return {"role": "user", "content": list(parts)}


BODIES = {
    "image_url": {"messages": [message({"type": "image_url", "image_url": {"url": URL, "max_pixels": 1000}})]},
    "image_url, a string": {"messages": [message({"type": "image_url", "image_url": URL})]},
    "video_url": {"messages": [message({"type": "video_url", "video_url": {"url": URL}})]},
    "audio_url": {"messages": [message({"type": "audio_url", "audio_url": {"url": URL}})]},
    "input_audio": {"messages": [message({"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}})]},
    "responses": {"input": [message({"type": "input_image", "image_url": URL})]},
    "anthropic, url": {"messages": [message({"type": "image", "source": {"type": "url", "url": URL}})]},
    "anthropic, base64": {
        "messages": [message({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL}})]
    },
    "token ids": {"token_ids": [1, 2], "content_parts": [{"type": "image_url", "url": URL}]},
    "score": {"query": "a", "documents": [message({"type": "image_url", "image_url": {"url": URL}})]},
    "cohere": {"images": [URL]},
}


def extracted(body, references, **given):
    return extract(json.dumps(body).encode(), MediaConfig(), references=references, **given)


@pytest.mark.parametrize("name", BODIES)
def test_reference_is_taken_wherever_media_are(name):
    references = References.random()
    intake = extracted(BODIES[name], references)
    (ref,) = intake.refs
    assert (ref.url, ref.data) == (URL, None)
    assert URL.encode() not in intake.body
    assert references.text(0).encode() in intake.body


@pytest.mark.parametrize(
    "url",
    [
        URL[:-1],
        URL + "0",
        URL.upper(),
        URL.replace("media/", "media//"),
        URL.replace("media/", "Media/"),
        "medialane:media/",
        "medialane:feature/" + "a" * 64,
        "medialane:0",
        "MEDIALANE:media/" + "a" * 64,
    ],
)
@pytest.mark.parametrize("api", ["url", "base64"])
def test_what_is_no_hash_is_refused(url, api):
    part = {
        "url": {"type": "image_url", "image_url": {"url": url}},
        "base64": {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    }[api]
    with pytest.raises(InvalidMediaUrl) as raised:
        extracted({"messages": [message(part)]}, References.random())
    assert raised.value.param == f"messages[0].content[0].{part['type']}"


def test_reference_of_the_gateway_cannot_be_written_by_a_client():
    references = References.random()
    with pytest.raises(InvalidMediaUrl):
        extracted({"messages": [message({"type": "image_url", "image_url": references.text(0)})]}, references)
    assert references.number(URL) is None
