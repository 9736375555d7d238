import numpy as np
import pytest
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

from medialane.types.errors import WorkerBusy
from medialane.vllm_bridge.engine_errors import MAX_CHARS, mapped_errors, public_text

SAMPLES = np.random.default_rng(0).standard_normal((8, 4000), np.float32)


@pytest.mark.parametrize(
    "text",
    [
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that it is not.",
        "At most 1 image(s) may be provided in one prompt.",
        "Supported methods: ['librosa', 'scipy']; sizes (1, 2, 3), [224, 224]",
        "Expected there to be 1 prompt placeholders corresponding to 2 image items",
        "shape (8, 4000) is not (1, 4000)",
        "temperature must be in [0.0, 2.0], got 3.5",
    ],
)
def test_plain_sentences_are_unchanged(text):
    assert public_text(ValueError(text)) == text


@pytest.mark.parametrize(
    "contents",
    [
        {"audio": [SAMPLES]},
        SAMPLES,
        SAMPLES.tolist(),
        SAMPLES[0].tolist(),
        SAMPLES.astype(int).ravel().tolist(),
        tuple(range(50)),
        str(SAMPLES[0]),
        np.full((3, 3, 3), np.nan),
    ],
    ids=["dict", "array", "rows", "row", "whole numbers", "tuple", "text", "not numbers"],
)
@pytest.mark.parametrize("before", ["Failed to apply FooProcessor on data=", "cannot resample ", "x: "])
def test_array_contents_are_removed(before, contents):
    found = public_text(ValueError(f"{before}{contents} with kwargs={{}}"))
    assert found.endswith("...")
    assert found.startswith(before.removesuffix("data=").strip())
    assert not any(digit in found for digit in "0123456789")


def test_tensors_images_and_addresses_are_removed():
    import torch
    from PIL import Image

    for value in (torch.ones(3), torch.ones(3, 3), Image.new("RGB", (3, 3)), object()):
        found = public_text(ValueError(f"cannot take {value!r}"))
        assert found == "cannot take ..."


def test_length_is_bounded():
    assert len(public_text(ValueError("x" * 1_000_000))) <= MAX_CHARS + 4


@pytest.mark.parametrize("error", [QueueOverflowError(), MaxQueuedTokensError()], ids=repr)
def test_engine_whose_queue_is_full_is_busy_with_vllms_message(error):
    with pytest.raises(WorkerBusy, match="try again later") as raised, mapped_errors():
        raise error
    assert raised.value.message == error.message
