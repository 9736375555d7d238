"""Decode options at three levels: merged as in vLLM; clients may set only those in the table."""

import inspect
import json
import math
from types import SimpleNamespace

import pytest
from vllm.multimodal import video
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.media.connector import merge_media_io_kwargs

from medialane.types.errors import InvalidRequest, StartupFailed
from medialane.vllm_bridge.items import check_model_io, final_io
from medialane.vllm_bridge.items.options import DEFAULT_NUM_FRAMES


def final(item=None, *, model=None, request=None, modality="video"):
    model = model or {}
    return json.loads(final_io(modality, model, request, json.dumps(item or {}).encode()))


def video_options(options):
    return {"video": options}


def test_defaults_apply_without_any_options():
    assert final() == {}
    assert final(request={}) == {}


@pytest.mark.parametrize(
    ("model", "request_", "item", "expected"),
    [
        ({"num_frames": 16}, {}, {}, {"num_frames": 16}),
        ({"num_frames": 16}, {"num_frames": 8}, {}, {"num_frames": 8}),
        ({"num_frames": 16}, {"num_frames": 8}, {"num_frames": 4}, {"num_frames": 4}),
        ({"num_frames": 16}, {"fps": 1}, {}, {"fps": 1}),
        ({"num_frames": 16}, {"num_frames": 8}, {"fps": 2}, {"fps": 2}),
        ({"fps": 1}, {"fps": 4}, {"num_frames": 3}, {"num_frames": 3}),
        ({"fps": 1}, {}, {"fps": 2, "num_frames": 3}, {"fps": 2, "num_frames": 3}),
        ({"max_duration": 60, "fps": 1}, {"frame_recovery": True}, {"fps": 2}, "all"),
        ({"backend": "opencv"}, {}, {"fps": 2}, {"backend": "opencv", "fps": 2}),
    ],
)
def test_precedence_is_item_request_model_as_in_vllm(model, request_, item, expected):
    if expected == "all":
        expected = {"max_duration": 60, "frame_recovery": True, "fps": 2}
    assert final(item, model=video_options(model), request=video_options(request_)) == expected
    vllm = VideoMediaIO.merge_kwargs(VideoMediaIO.merge_kwargs(model, request_), item)
    assert vllm == expected


@pytest.mark.parametrize("item", [{}, {"fps": 2}, {"num_frames": 3}, {"max_frames": 5}])
def test_request_options_may_already_include_the_models(item):
    model = {"video": {"num_frames": 16, "backend": "opencv", "hw_decoders": 2}, "image": {"image_mode": "RGB"}}
    request = {"video": {"fps": 1}}
    merged = merge_media_io_kwargs(model, request)
    assert final(item, model=model, request=merged) == final(item, model=model, request=request)


def test_merging_final_options_with_the_models_is_idempotent():
    model = {"num_frames": 16, "max_duration": 60}
    found = final({"fps": 2, "max_frames": 8}, model=video_options(model), request={"video": {"min_frames": 2}})
    assert VideoMediaIO.merge_kwargs(model, found) == found


@pytest.mark.parametrize(
    ("model", "item", "num_frames"),
    [
        ({}, {"max_frames": 8}, 8),
        ({}, {"max_frames": 64}, 32),
        ({}, {"max_frames": 64, "fps": 2}, 64),
        ({"fps": 1}, {"max_frames": 64}, 64),
        ({"num_frames": 16, "fps": 1}, {"max_frames": 64}, 16),
        ({"num_frames": 100}, {"max_frames": 64}, 64),
        ({"num_frames": 100}, {"max_frames": 100}, 100),
        ({"num_frames": -1}, {"max_frames": 64}, 64),
        ({"num_frames": 100}, {"max_frames": 64, "num_frames": 70}, 64),
        ({"num_frames": 100}, {"max_frames": 64, "num_frames": 7}, 7),
    ],
)
def test_max_frames_of_an_item_caps_num_frames(model, item, num_frames):
    found = final(item, model=video_options(model))
    assert found.get("num_frames") == num_frames
    assert found["max_frames"] == item["max_frames"]


def test_max_frames_of_a_request_is_passed_to_the_sampler():
    assert final(request=video_options({"max_frames": 8})) == {"max_frames": 8}


def test_default_num_frames_equals_vllms():
    assert inspect.signature(VideoMediaIO).parameters["num_frames"].default == DEFAULT_NUM_FRAMES


@pytest.mark.parametrize(
    ("modality", "key", "value"),
    [
        ("video", "backend", "torchcodec"),
        ("video", "backend", "pynvvideocodec"),
        ("video", "backend", "opencv"),
        ("video", "video_backend", "qwen3_vl"),
        ("video", "device", "cuda"),
        ("video", "hw_decoders", 64),
        ("video", "pool_size", 64),
        ("video", "num_ffmpeg_threads", 64),
        ("video", "video_processor", "x"),
        ("video", "anything", 1),
        ("video", "fps", 0),
        ("video", "fps", 1e9),
        ("video", "fps", math.inf),
        ("video", "fps", math.nan),
        ("video", "fps", "2"),
        ("video", "fps", True),
        ("video", "num_frames", 0),
        ("video", "num_frames", -2),
        ("video", "num_frames", -1.0),
        ("video", "num_frames", 2.0),
        ("video", "num_frames", None),
        ("video", "temporal_patch_size", 0),
        ("video", "temporal_patch_size", 1000),
        ("video", "max_duration", math.inf),
        ("video", "frame_recovery", 1),
        ("video", "overflow_strategy", ["uniform"]),
        ("video", "frames_indices", [0, -1]),
        ("video", "frames_indices", "01"),
        ("image", "image_mode", None),
        ("image", "image_mode", "RGBA"),
        ("image", "rgba_background_color", [0, 0, 0]),
        ("image", "rgba_background_color", 255),
        ("image", "anything", 1),
        ("audio", "audio_backend", "pyav"),
        ("audio", "anything", 1),
    ],
)
@pytest.mark.parametrize("asked_of", ["image", "video", "audio"])
def test_forbidden_option_is_named(asked_of, modality, key, value):
    with pytest.raises(InvalidRequest) as raised:
        final(modality=asked_of, request={modality: {key: value}})
    assert raised.value.param == f"media_io_kwargs.{modality}.{key}"


@pytest.mark.parametrize(
    ("request_", "param"), [({"smell": {}}, "smell"), ({"video": 3}, "video"), ({"video": [1]}, "video")]
)
def test_malformed_options_are_rejected(request_, param):
    with pytest.raises(InvalidRequest) as raised:
        final(request=request_)
    assert raised.value.param == f"media_io_kwargs.{param}"


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_image_and_audio_have_no_per_item_options(modality):
    model = {"video": {"fps": 1}, "image": {"image_mode": "RGB"}}
    request = {"image": {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}, "video": {"fps": 2}}
    assert final(modality=modality, model=model, request=request) == {}


def test_permitted_image_options_are_vllms_defaults():
    image_io = ImageMediaIO()
    assert (image_io.image_mode, image_io.rgba_background_color) == ("RGB", (255, 255, 255))


def started(options):
    check_model_io(SimpleNamespace(multimodal_config=SimpleNamespace(media_io_kwargs=options)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"video": {"num_frames": 64, "fps": 2, "min_frames": 1, "backend": "opencv", "video_backend": "qwen3_vl"}},
        {"image": {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}, "audio": {"audio_backend": "auto"}},
    ],
)
def test_supported_operator_options_are_applied(options):
    assert started(options) is None
    assert check_model_io(SimpleNamespace(multimodal_config=None)) is None


@pytest.mark.parametrize(
    ("modality", "key", "value"),
    [
        ("image", "image_mode", None),
        ("image", "rgba_background_color", (0, 0, 0)),
        ("image", "anything", 1),
        ("audio", "audio_backend", "torchcodec"),
        ("video", "backend", "torchcodec"),
        ("video", "video_backend", "pynvvideocodec"),
        ("video", "device", "cuda"),
        ("smell", "strength", 1),
    ],
)
def test_unsupported_operator_options_fail_the_start(modality, key, value):
    with pytest.raises(StartupFailed, match=rf"{modality}\.{key}.*--stage url"):
        started({modality: {key: value}})


def test_every_other_decoder_and_sampler_that_needs_a_gpu_fails_the_start():
    gpu = {
        name
        for name in video.VIDEO_LOADER_REGISTRY.name2class
        if video.VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
    }
    for decoder in gpu | set(video.VideoDecoderBackend.__args__) - {"opencv"}:
        with pytest.raises(StartupFailed, match="--stage url"):
            started({"video": {"video_backend": decoder}})
