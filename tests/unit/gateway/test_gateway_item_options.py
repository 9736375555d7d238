"""Options of a media item: read by modality, checked, and canonical in the reference."""

import json
import re

import pytest

from medialane.gateway import References
from medialane.gateway.intake import extract
from medialane.media import MediaConfig
from medialane.types.errors import InvalidRequest, TooManyFrames

URL = "https://example.com/clip.mp4"
CONFIG = MediaConfig(max_sampled_frames=100, max_image_pixels=5_000_000, max_video_pixels=2_000_000)


def extracted(name, **options):
    part = {"type": name, name: {"url": URL, **options}}
    body = json.dumps({"messages": [{"role": "user", "content": ["x", part]}]}).encode()
    return extract(body, CONFIG, references=References("medialane:"))


def ref(name, **options):
    (found,) = extracted(name, **options).refs
    return json.loads(found.io), json.loads(found.options)


def test_options_of_a_video_are_its_decode_and_processor_options():
    found = ref("video_url", fps=2, num_frames=8, max_frames=64, min_pixels=3136, max_pixels=200_704)
    assert found == ({"fps": 2, "num_frames": 8, "max_frames": 64}, {"min_pixels": 3136, "max_pixels": 200_704})


def test_image_has_only_processor_options():
    found = ref("image_url", fps=2, num_frames=8, max_frames=64, max_pixels=200_704, detail="high")
    assert found == ({}, {"max_pixels": 200_704})


def test_audio_has_no_options():
    assert ref("audio_url", fps=2, max_pixels=9) == ({}, {})


@pytest.mark.parametrize("options", [{}, {"fps": None, "max_pixels": None}, {"format": "mp4", "detail": "low"}])
def test_absent_options_are_none(options):
    assert ref("video_url", **options) == ({}, {})


def test_equal_options_serialise_to_equal_bytes():
    (one,) = extracted("video_url", fps=2, max_frames=4).refs
    (other,) = extracted("video_url", max_frames=4.0, fps=2.0).refs
    assert one.io == other.io == b'{"fps":2,"max_frames":4}'


def test_fractional_fps_is_kept():
    assert ref("video_url", fps=0.5) == ({"fps": 0.5}, {})


def test_options_are_clamped_to_the_gateway_limits():
    assert ref("video_url", max_frames=10**6, max_pixels=10**9) == ({"max_frames": 100}, {"max_pixels": 2_000_000})
    assert ref("image_url", max_pixels=10**9) == ({}, {"max_pixels": 5_000_000})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("video_url", "fps", 0),
        ("video_url", "fps", -1),
        ("video_url", "fps", 241),
        ("video_url", "fps", 1e300),
        ("video_url", "fps", "2"),
        ("video_url", "fps", True),
        ("video_url", "fps", [2]),
        ("video_url", "num_frames", 0),
        ("video_url", "num_frames", -1),
        ("video_url", "num_frames", 1.5),
        ("video_url", "num_frames", 10**30),
        ("video_url", "max_frames", 0),
        ("video_url", "max_frames", {}),
        ("image_url", "max_pixels", 0),
        ("image_url", "max_pixels", "1"),
        ("image_url", "min_pixels", 5_000_001),
        ("video_url", "min_pixels", 2_000_001),
        ("video_url", "min_pixels", False),
    ],
    ids=str,
)
def test_error_names_the_option(name, key, value):
    with pytest.raises(InvalidRequest) as raised:
        ref(name, **{key: value})
    assert raised.value.param == f"messages[0].content[1].{name}.{key}"


def test_more_frames_than_the_gateway_limit_are_rejected():
    with pytest.raises(TooManyFrames) as raised:
        ref("video_url", num_frames=101)
    assert raised.value.param == "messages[0].content[1].video_url.num_frames"


def test_min_pixels_above_max_pixels_are_rejected():
    with pytest.raises(InvalidRequest) as raised:
        ref("image_url", min_pixels=11, max_pixels=10)
    assert raised.value.param == "messages[0].content[1].image_url.min_pixels"


def test_options_in_the_body_are_unchanged():
    part = json.loads(extracted("video_url", fps=2, detail={"y": 1}).body)["messages"][0]["content"][1]
    assert part["video_url"] == {"url": "medialane:0", "fps": 2, "detail": {"y": 1}}


SOURCE = {"type": "url", "url": "http://a/"}


@pytest.mark.parametrize(
    ("part", "param", "hint"),
    [
        ({"video_url": {"url": "http://a/", "fsp": 2}}, "video_url.fsp", "did you mean fps?"),
        ({"image_url": {"url": "http://a/", "max_pixel": 2}}, "image_url.max_pixel", "did you mean max_pixels?"),
        ({"audio_url": {"url": "http://a/", "zzz": 2}}, "audio_url.zzz", "the known ones are fps, num_frames"),
        ({"input_audio": {"data": "QUJD", "formt": "wav"}}, "input_audio.formt", "did you mean format?"),
        ({"type": "image", "source": SOURCE | {"mediatype": "x"}}, "source.mediatype", "did you mean media_type?"),
        ({"video_url": {"nun_frames": 2}, "uuid": "u"}, "video_url.nun_frames", "did you mean num_frames?"),
        ({"image_url": {"url": "http://a/", "k" * 9999: 2}}, f"image_url.{'k' * 64}", "the known ones"),
    ],
)
def test_unknown_key_is_an_error_with_the_nearest_name(part, param, hint):
    body = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(InvalidRequest, match=re.escape(hint)) as raised:
        extract(json.dumps(body).encode(), CONFIG, references=References("medialane:"))
    assert raised.value.param == f"messages[0].content[0].{param}"


def test_unknown_key_of_a_content_part():
    body = {"token_ids": [1], "content_parts": [{"type": "text", "x": 1}, {"type": "video_url", "url": "u", "fsp": 2}]}
    with pytest.raises(InvalidRequest, match="did you mean fps") as raised:
        extract(json.dumps(body).encode(), CONFIG, references=References("medialane:"))
    assert raised.value.param == "content_parts[1].fsp"


#: What the schemas of OpenAI, Anthropic and vLLM have, beside and inside the object.
CACHED = {"prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": {"type": "ephemeral"}, "any": 1}
VALID = [
    {"type": "image_url", "image_url": {"url": "http://a/", "detail": "high"}, "uuid": "u", **CACHED},
    {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}, **CACHED},
    {"type": "input_image", "detail": "auto", "file_id": None, "image_url": "http://a/", **CACHED},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}, **CACHED},
    {"type": "video_url", "video_url": {"url": "http://a/", "format": "video/mp4"}, "fps": 2},
]


@pytest.mark.parametrize("part", VALID, ids=lambda part: part["type"])
def test_keys_of_the_apis_are_accepted(part):
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert len(extract(json.dumps(body).encode(), CONFIG, references=References("medialane:")).refs) == 1
