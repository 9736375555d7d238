"""Token ids equal plain vLLM's for every family and input."""

import base64

import pytest
from openai_http import assert_same, chat, data_url, picture, text

from audio_maker import tone
from video_clips import clip, panned

pytestmark = pytest.mark.vllm

ASK = text("What do you make of it?")


def video(seed, *, frames=24, fps=12, size=(224, 168)):
    data = clip(frames, draw=panned(seed, frames), fps=fps, size=size)
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def audio(pitch_hz, seconds=1.5, **kind):
    return {"type": "audio_url", "audio_url": {"url": data_url(tone(pitch_hz, seconds, **kind), "audio/wav")}}


def input_audio(pitch_hz, seconds=1.5):
    data = base64.b64encode(tone(pitch_hz, seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


LONG = {"size": (160, 120), "frames": 90, "fps": 25}

#: How many items of each modality a request has (conftest.py skips what a family does not support), and the request.
BODIES = {
    "text": ({}, [text("Say something.")]),
    "image": ({"image": 1}, [picture(0), ASK]),
    "image between texts": ({"image": 1}, [text("Look at"), picture(1, 301, 422), text("and say it.")]),
    "small image": ({"image": 1}, [picture(2, 57, 30), ASK]),
    "two images": ({"image": 2}, [picture(3, 640, 200), text("and"), picture(4, 240, 500), ASK]),
    "the same image twice": ({"image": 2}, [picture(0), text("and"), picture(0), ASK]),
    "video": ({"video": 1}, [video(0), ASK]),
    "long video after text": ({"video": 1}, [text("Look at"), video(1, **LONG)]),
    "two videos": ({"video": 2}, [video(2), text("and"), video(3, frames=40, size=(192, 168)), ASK]),
    "audio": ({"audio": 1}, [audio(440), ASK]),
    "audio at another rate": ({"audio": 1}, [text("Hear"), audio(620, 2.3, rate=44100)]),
    "audio in place": ({"audio": 1}, [input_audio(300), ASK]),
    "two audio clips": ({"audio": 2}, [audio(250, 1), text("and"), audio(900, 3.1, container="FLAC"), ASK]),
    "image and video": ({"image": 1, "video": 1}, [picture(5), video(4), ASK]),
    "video before images": ({"image": 2, "video": 1}, [video(4), picture(6, 300, 300), text("or"), picture(7), ASK]),
    "everything": (
        {"image": 2, "video": 1, "audio": 2},
        [audio(500), picture(8), text("with"), video(5), input_audio(800, 2), picture(9, 333, 222), ASK],
    ),
}

DIFFERENT = {
    "image": (picture(0), picture(1)),
    "video": (video(0), video(6)),
    "audio": (audio(250), audio(900)),
}


@pytest.mark.parametrize(("counts", "parts"), BODIES.values(), ids=BODIES)
async def test_output_equals_plain_vllm(servers, counts, parts):
    asked = chat(*parts)
    answer, right = await servers.ours.succeed(asked), await servers.plain.succeed(asked)
    assert answer.ids
    assert sum(counts.values()) == sum(part["type"] != "text" for part in parts)
    assert_same(answer.json, right.json)


async def test_output_is_deterministic_and_depends_on_the_media(servers):
    for modality in servers.family.limits:
        asked = [chat(media, ASK) for media in DIFFERENT[modality]]
        one, other, again = [(await servers.plain.succeed(body)).ids for body in (*asked, asked[0])]
        assert one != other, modality
        assert one == again, modality


async def test_cached_media_give_the_same_output(servers):
    """Features from the arena and encoder outputs from the engine's cache, in another prompt."""
    first = {modality: DIFFERENT[modality][0] for modality in servers.family.limits}
    for media in first.values():
        await servers.ours.succeed(chat(media, ASK))
    asked = chat(text("Once more:"), *first.values(), text("Well?"))
    answer = await servers.ours.succeed(asked)
    assert answer.cache == "hit"
    assert_same(answer.json, (await servers.plain.succeed(asked)).json)
    # The other tests of this file used features, too.
    assert (await servers.ours.metrics()).value("medialane_transfer_fallbacks_total") == 0
