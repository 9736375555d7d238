import pytest

from medialane.core.errors import InvalidRequest
from medialane.vllm_bridge.processor_options import check_processor_options


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
