"""An arena that is mapped read-only becomes pinned memory of CUDA."""

import gc

import pytest

from builders import checked_arena
from medialane.arena import ArenaView, describe, layout
from medialane.types.tensor import TensorSpec
from waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

torch = pytest.importorskip("torch")

SPEC = TensorSpec("float32", (1 << 20,))


@pytest.fixture
def view():
    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: pinned arenas: there is no CUDA device")
    torch.zeros(1, device="cuda")
    with checked_arena() as arena:
        reservation = arena.reserve(layout([SPEC])[1])
        (descriptor,) = describe(reservation.range, [SPEC])
        arena.view.tensor(descriptor, writable=True)[:] = torch.rand(SPEC.shape).numpy().tobytes()
        view = ArenaView.open(arena.id, str(arena.path.parent))
        yield view, descriptor
        view.close()
        gc.collect()  # frames reference tensors over the mapping
        reservation.abandon()


@pytest.fixture
def pinned():
    from medialane.vllm_bridge.items.arena_tensors import pinned

    return pinned


def test_tensor_over_a_registered_arena_is_pinned_and_reaches_the_device(view, pinned):
    from medialane.vllm_bridge.items import tensor_over

    view, descriptor = view
    registered = pinned(view.memory, torch.cuda)
    assert registered is not None
    tensor = tensor_over(SPEC, view.tensor(descriptor))
    wait_until(tensor.is_pinned)
    sent = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(sent.cpu(), tensor)
    registered.release()
    assert not tensor.is_pinned()
    del tensor


def test_registration_that_cuda_refuses_is_logged_and_kernels_run(view, pinned, caplog):
    view, _ = view
    registered = pinned(view.memory, torch.cuda)
    wait_until(torch.frombuffer(view.memory, dtype=torch.uint8).is_pinned)
    caplog.set_level("WARNING", "medialane")
    pinned(view.memory, torch.cuda).release()  # it is registered already
    assert "the arena is not pinned" in caplog.text
    assert torch.ones(4, device="cuda").sum().item() == 4
    registered.release()
