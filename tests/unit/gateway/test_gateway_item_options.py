"""Options of a media item: read by modality, checked, and canonical in the reference."""

import json

import pytest

from medialane.core.errors import InvalidRequest, TooManyFrames
from medialane.gateway.intake import extract
from medialane.gateway.references import References
from medialane.media import MediaConfig

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


@pytest.mark.parametrize("options", [{}, {"fps": None, "max_pixels": None}, {"rotate": 90, "detail": "low"}])
def test_absent_or_unknown_options_are_none(options):
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
    part = json.loads(extracted("video_url", fps=2, x={"y": 1}).body)["messages"][0]["content"][1]
    assert part["video_url"] == {"url": "medialane:0", "fps": 2, "x": {"y": 1}}
