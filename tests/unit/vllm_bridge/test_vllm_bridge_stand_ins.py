"""A stand-in has a shape and no values: whatever needs one raises, and nothing is silently wrong."""

import numpy as np
import pytest
import torch

from medialane.vllm_bridge.seams.stand_ins import StandIn, stand_in_for

REAL = torch.arange(20).view(4, 5)


@pytest.fixture
def unknown():
    return stand_in_for(torch.int64, (4, 5))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: int(x[0, 0]),
        lambda x: bool(x.any()),
        lambda x: 1 if x[0, 0] == 3 else 2,
        lambda x: x.tolist(),
        lambda x: x.sum(-1).tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: np.asarray([x[0, 0]]),
        lambda x: np.from_dlpack(x),
        lambda x: memoryview(x),
        lambda x: torch.tensor([x[0, 0], x[0, 1]]),
        lambda x: torch.equal(x, REAL),
        lambda x: x.nonzero(),
        lambda x: REAL[x > 3],
        lambda x: REAL.split(x[0].tolist()),
        lambda x: torch.arange(x[0, 0]),
        lambda x: torch.zeros(x[0, 0], 3),
        lambda x: [7] * x[0, 0],
        lambda x: range(x[0, 0]),
        lambda x: 3 in x,
        lambda x: (x + REAL).max().item(),
        lambda x: torch.where(x > 0, REAL, 0).sum().item(),
        lambda x: torch.zeros_like(x).sum().item(),
        lambda x: torch.cat([REAL, x])[0].tolist(),
    ],
)
def test_reading_a_value_raises(unknown, read):
    with pytest.raises((RuntimeError, TypeError)):
        read(unknown)


@pytest.mark.parametrize(
    "write",
    [
        lambda real, x: real.add_(x),
        lambda real, x: real.copy_(x),
        lambda real, x: real.masked_fill_(x > 0, 7),
        lambda real, x: torch.add(x, x, out=real),
        lambda real, x: real.__setitem__(x > 0, 7),
        lambda real, x: real.__setitem__(0, x[0]),
        lambda real, x: real[1:].clamp_(max=x[1:]),
    ],
)
def test_writing_to_a_real_tensor_raises(unknown, write):
    """Torch's own meta tensors leave the real one as it was in some of these cases."""
    with pytest.raises(RuntimeError):
        write(REAL.clone(), unknown)


@pytest.mark.parametrize(
    ("compute", "shape", "dtype"),
    [
        (lambda x: x[1:3], (2, 5), torch.int64),
        (lambda x: x.view(2, 10).float(), (2, 10), torch.float32),
        (lambda x: torch.cat([REAL, x]), (8, 5), torch.int64),
        (lambda x: torch.stack([x, REAL]), (2, 4, 5), torch.int64),
        (lambda x: torch.stack([x, x], out=x.new_empty(2, 4, 5)), (2, 4, 5), torch.int64),
        (lambda x: (x > REAL).sum(-1), (4,), torch.int64),
        (lambda x: x.unsqueeze(0).contiguous(), (1, 4, 5), torch.int64),
        (lambda x: x.unbind()[3], (5,), torch.int64),
    ],
)
def test_shapes_are_computed(unknown, compute, shape, dtype):
    found = compute(unknown)
    assert isinstance(found, StandIn)
    assert (tuple(found.shape), found.dtype, found.device.type) == (shape, dtype, "cpu")


def test_buffer_of_a_batch_stays_unknown(unknown):
    """As vLLM batches fields of different lengths."""
    buffer = unknown.new_empty(8, 5)
    buffer[:4].copy_(unknown)
    buffer[4:].copy_(REAL)
    with pytest.raises(RuntimeError):
        buffer[7, 4].item()


def test_size_takes_no_memory():
    huge = stand_in_for(torch.float32, (1 << 20, 1 << 20))
    assert (len(huge), huge.nbytes, repr(huge)) == (1 << 20, 1 << 42, f"StandIn(torch.float32, {(1 << 20, 1 << 20)})")
