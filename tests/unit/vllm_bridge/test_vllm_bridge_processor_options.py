import pytest

from medialane.types.errors import InvalidRequest
from medialane.vllm_bridge.items import check_processor_options, check_worker_options


@pytest.mark.parametrize(
    "options", [None, {}, {"min_pixels": 3}, {"size": {"images": 1}}, {"images_kwargs": {"do_resize": False}}]
)
def test_processor_options_are_accepted(options):
    check_processor_options(options)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"return_tensors": "np"}, "mm_processor_kwargs.return_tensors"),
        ({"return_tensors": None}, "mm_processor_kwargs.return_tensors"),
        ({"images": []}, "mm_processor_kwargs.images"),
        (
            {"max_pixels": 3, "images_kwargs": {"return_tensors": "np"}},
            "mm_processor_kwargs.images_kwargs.return_tensors",
        ),
        ({"common_kwargs": {"return_tensors": "tf"}}, "mm_processor_kwargs.common_kwargs.return_tensors"),
    ],
)
def test_options_set_by_vllm_are_rejected_by_name(options, param):
    with pytest.raises(InvalidRequest) as refused:
        check_processor_options(options)
    assert (refused.value.status, refused.value.param) == (400, param)


LIMITS = {"image": 1000, "video": 100}


@pytest.mark.parametrize(
    ("options", "modalities"),
    [
        ({}, {"image"}),
        ({"max_pixels": 1000, "min_pixels": 1}, {"image"}),
        ({"size": {"shortest_edge": 1, "longest_edge": 100}}, {"image", "video"}),
        ({"use_audio_in_video": True, "do_sample_frames": False}, {"video", "audio"}),
    ],
)
def test_workers_accept_options_that_cannot_widen(options, modalities):
    check_worker_options(options, LIMITS, modalities)


@pytest.mark.parametrize(
    ("options", "modalities", "name"),
    [
        ({"max_pixels": 1001}, {"image"}, "max_pixels"),
        ({"max_pixels": 101}, {"image", "video"}, "max_pixels"),
        ({"max_pixels": True}, {"image"}, "max_pixels"),
        ({"max_pixels": 100}, {"audio"}, "max_pixels"),
        ({"min_pixels": 0}, {"image"}, "min_pixels"),
        ({"min_pixels": -5}, {"image"}, "min_pixels"),
        ({"size": {"shortest_edge": 9, "longest_edge": 1001}}, {"image"}, "size.longest_edge"),
        ({"size": {"shortest_edge": 9, "height": 9}}, {"image"}, "size"),
        ({"use_audio_in_video": 10**9}, {"video"}, "use_audio_in_video"),
        ({"max_pixels": 100, "fps": 1}, {"video"}, "fps"),
        ({"images_kwargs": {"max_pixels": 1}}, {"image"}, "images_kwargs"),
    ],
)
def test_workers_reject_other_options_by_name(options, modalities, name):
    with pytest.raises(InvalidRequest) as refused:
        check_worker_options(options, LIMITS, modalities)
    assert (refused.value.status, refused.value.param) == (400, f"mm_processor_kwargs.{name}")


def test_pixel_limits_of_a_family_without_them_are_rejected():
    with pytest.raises(InvalidRequest, match="--stage features"):
        check_worker_options({"max_pixels": 9}, {}, {"image"})
