"""Sampled frames and their metadata equal vLLM's, value for value."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from decoded_media import decode_video
from medialane.media import MediaConfig
from medialane.types.errors import InvalidRequest, InvalidVideo, TooManyFrames
from medialane.types.media import FrameBatch
from medialane.vllm_bridge.items import preparation as frame_sampler
from medialane.vllm_bridge.seams import multimodal
from video_clips import broken, clip, jpegs, remux

LOADERS = ["opencv", "qwen2_vl", "qwen3_vl", "opencv_dynamic", "glm46v", "glmga", "molmo2", "openpangu", "glm5next"]

#: Client options for the number of frames.
ASKED = [{}, {"num_frames": 5}, {"num_frames": -1}, {"fps": 1}, {"fps": 7.5}, {"fps": 3, "num_frames": 4}]
ASKED_OF_OTHERS = [{}, {"fps": 7.5}]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """OpenCV's decoder with several threads differs from itself with one on damaged files."""
    monkeypatch.setenv("OPENCV_FFMPEG_THREADS", "1")


def by_vllm(data: bytes, io: dict, media_type: str = "") -> tuple[np.ndarray, dict]:
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    reader = VideoMediaIO(ImageMediaIO(), **io)
    loaded = reader.load_base64(media_type, data.decode()) if media_type else reader.load_bytes(data)
    frames, metadata = loaded.media
    return frames, metadata


def ours(data: bytes, io: dict, config: MediaConfig | None = None, own: dict | None = None) -> FrameBatch:
    return decode_video(data, config or MediaConfig(), sampler(own), io)


def sampler(own: dict | None = None):
    model = SimpleNamespace(media_io_kwargs={"video": own} if own else None)
    return frame_sampler.VllmFrameSampler(
        SimpleNamespace(multimodal_config=model, model="no-such-model", revision=None)
    )


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    """Do not look up a model's folder: tests name the loader."""
    monkeypatch.setattr(multimodal, "get_video_processor_cls_name", lambda _config: None)


def assert_exact(data: bytes, io: dict) -> None:
    expected, metadata = by_vllm(data, dict(io))
    found = ours(data, io)
    assert msgspec.json.decode(found.metadata) == json.loads(json.dumps(metadata))
    assert found.frames.flags.c_contiguous
    assert np.array_equal(found.frames, expected)


CLIPS = {
    "h264 25": lambda: clip(47),
    "h264 b-frames": lambda: clip(61, b_frames=3, gop=12),
    "h264 29.97 mkv": lambda: clip(47, fps=Fraction(30000, 1001), b_frames=2, container="matroska"),
    "h264 23.976": lambda: clip(70, fps=Fraction(24000, 1001), b_frames=2, gop=24),
    "hevc": lambda: clip(50, codec="libx265", b_frames=3),
    "hevc mkv": lambda: clip(50, codec="libx265", container="matroska"),
    "vp9": lambda: clip(50, codec="libvpx-vp9", container="webm"),
    "vp8": lambda: clip(50, codec="libvpx", container="webm"),
    "mpeg4": lambda: clip(50, codec="mpeg4", b_frames=2),
    "long": lambda: clip(400, size=(32, 32), fps=10, gop=50),
    "six": lambda: clip(6),
    "fragments": lambda: clip(60, b_frames=2, container_options={"movflags": "frag_keyframe+empty_moov"}),
    "open gop": lambda: clip(60, b_frames=3, gop=12, options={"x264-params": "open-gop=1:scenecut=0:b-adapt=0"}),
    "uneven rate": lambda: clip(40, pts=[i * 40 + i % 5 * 7 + (200 if i > 20 else 0) for i in range(40)], ticks=1000),
    "uneven rate mkv": lambda: clip(
        40, container="matroska", b_frames=2, pts=[i * i * 3 + i * 10 for i in range(40)], ticks=1000
    ),
    "edit list": lambda: remux(clip(60, b_frames=2, gop=20), shift=-13),
    "edit list over a keyframe": lambda: remux(clip(60, b_frames=2, gop=20), shift=-25),
    "late start": lambda: remux(clip(60, b_frames=2, gop=20), shift=100),
    "times below zero": lambda: remux(
        clip(60, b_frames=2, gop=20), shift=-13, container="matroska", avoid_negative_ts="disabled"
    ),
    "cut short": lambda: remux(clip(60, b_frames=2, gop=20), container="matroska")[:-2000],
    "damaged": lambda: broken(clip(60, container="matroska", b_frames=2, gop=20)),
    "damaged mp4": lambda: broken(clip(60, gop=20, size=(160, 120))),
}

PICTURES = {
    "90 degrees": lambda: clip(8, rotation=90, size=(64, 38)),
    "180 degrees": lambda: clip(8, rotation=180, size=(64, 38)),
    "270 degrees": lambda: clip(8, rotation=-90, size=(64, 38)),
    "45 degrees": lambda: clip(8, rotation=45),
    "odd size": lambda: clip(8, size=(65, 39), pix_fmt="yuv444p"),
    "padded by the codec": lambda: clip(8, size=(50, 38)),
    "4:2:2": lambda: clip(8, size=(66, 38), pix_fmt="yuv422p"),
    "10 bit": lambda: clip(8, size=(66, 38), pix_fmt="yuv420p10le"),
    "10 bit hevc": lambda: clip(8, codec="libx265", size=(66, 38), pix_fmt="yuv420p10le"),
    "rgb": lambda: clip(8, codec="libx264rgb", pix_fmt="rgb24"),
    "gray": lambda: clip(8, pix_fmt="gray"),
    "bt709": lambda: clip(8, options={"colorspace": "bt709", "color_primaries": "bt709", "color_trc": "bt709"}),
    "full range": lambda: clip(8, pix_fmt="yuvj420p"),
    "full range hevc": lambda: clip(8, codec="libx265", pix_fmt="yuvj420p"),
    "full range vp9": lambda: clip(8, codec="libvpx-vp9", container="webm", options={"color_range": "pc"}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CLIPS)
def test_every_sampler_selects_the_same_frames_as_vllm(name):
    data = CLIPS[name]()
    for loader in LOADERS:
        if loader == "glm5next" and name in ("damaged", "damaged mp4"):
            continue  # vLLM's own decoder, which leaves memory unwritten where a frame is missing
        for asked in ASKED if loader in ("opencv", "qwen2_vl") else ASKED_OF_OTHERS:
            assert_same_outcome(data, {"video_backend": loader, **asked})


def assert_same_outcome(data: bytes, io: dict) -> None:
    """Where vLLM returns no frames, we raise our own error."""
    try:
        frames, _ = by_vllm(data, dict(io))
    except (ValueError, AssertionError, IndexError, ZeroDivisionError, RuntimeError):
        frames = ()
    if len(frames):
        assert_exact(data, io)
    else:
        with pytest.raises(InvalidVideo):
            ours(data, io)


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_equal_vllms(name):
    assert_exact(PICTURES[name](), {"num_frames": -1})


def test_model_options_apply_without_client_options():
    data = clip(50)
    own = {"video_backend": "qwen3_vl", "fps": 5}
    expected, metadata = by_vllm(data, dict(own))
    found = ours(data, {}, own=own)
    assert np.array_equal(found.frames, expected)
    assert msgspec.json.decode(found.metadata) == metadata


def test_num_frames_of_the_client_overrides_the_models_fps():
    found = ours(clip(50), {"num_frames": 7}, own={"fps": 1})
    assert len(found.frames) == 7


def test_frames_of_a_damaged_video_are_recovered_as_by_vllm():
    data = broken(clip(60, container="matroska", b_frames=2, gop=20), seed=2)
    assert_exact(data, {"num_frames": -1, "frame_recovery": True})


def test_jpeg_frame_list_is_read_as_by_vllm():
    data = jpegs(6)
    for io in ({}, {"num_frames": 4}, {"fps": 2, "total_num_frames": 60, "frames_indices": [0, 10, 20, 30, 40, 50]}):
        expected, metadata = by_vllm(data, dict(io), "video/jpeg")
        found = ours(data, io)
        assert np.array_equal(found.frames, expected)
        assert msgspec.json.decode(found.metadata) == metadata


def test_jpeg_frame_list_contradicting_its_options_is_invalid():
    with pytest.raises(InvalidVideo):
        ours(jpegs(3), {"frames_indices": [0]})


def test_single_frame_video_gives_its_frame_unlike_vllm():
    data = clip(1)
    assert len(by_vllm(data, {})[0]) == 0
    assert ours(data, {}).frames.shape == (1, 48, 64, 3)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_av1_is_decoded_where_opencv_has_no_decoder_for_it(container):
    found = ours(clip(30, codec="libsvtav1", container=container), {"num_frames": 5})
    metadata = msgspec.json.decode(found.metadata)
    assert found.frames.shape == (5, 48, 64, 3)
    assert metadata["frames_indices"] == [0, 7, 14, 21, 29]


def test_too_many_frames_are_rejected_by_both_decoders():
    config = MediaConfig(max_sampled_frames=10)
    with pytest.raises(TooManyFrames):
        ours(clip(30), {"num_frames": -1}, config)


def test_unsupported_decoder_is_rejected():
    with pytest.raises(InvalidRequest):
        ours(clip(5), {"backend": "torchcodec"})


def test_gpu_decoder_requested_by_a_client_is_ignored_as_in_vllm():
    assert np.array_equal(ours(clip(5), {"video_backend": "pynvvideocodec"}).frames, ours(clip(5), {}).frames)


def test_vllms_decoder_is_restored_afterwards():
    from vllm.multimodal.video_decoders import opencv

    before = opencv.decode_opencv
    with pytest.raises(InvalidVideo):
        ours(clip(1), {"video_backend": "qwen2_vl"})  # which needs an even number of frames
    assert opencv.decode_opencv is before
