import pytest

from medialane.core.errors import HandoverFailed
from medialane.core.tensor import ArenaRange, InlineTensor, TensorDescriptor, TensorSpec
from medialane.transfer import InlineReceiver, InlineTransport, ShmReceiver, ShmTransport

RANGE = ArenaRange("ab" * 16, 0, 1024, 1)
TENSORS = (
    TensorDescriptor(TensorSpec("uint8", (4, 3)), RANGE, 64),
    TensorDescriptor(TensorSpec("float32", (5,)), RANGE, 128),
)
MEMORY = memoryview(bytes(range(256)) * 4)


class View:
    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        return MEMORY[descriptor.offset : descriptor.offset + descriptor.spec.nbytes]


def ends(name):
    if name == "shm":
        receiver = ShmReceiver()
        receiver.add(RANGE.arena, View())
        return ShmTransport(), receiver
    return InlineTransport(View().tensor, max_bytes=1024), InlineReceiver()


@pytest.mark.parametrize("name", ["shm", "inline"])
def test_tensors_arrive_as_they_were_published(name):
    transport, receiver = ends(name)
    assert transport.name == name
    handed = transport.publish(TENSORS)
    assert [t.spec for t in handed] == [t.spec for t in TENSORS]
    assert [bytes(receiver.fetch(t)) for t in handed] == [bytes(View().tensor(t)) for t in TENSORS]


@pytest.mark.parametrize("name", ["shm", "inline"])
def test_receiver_refuses_the_other_transports_tensors(name):
    transport, _ = ends(name)
    _, other = ends("inline" if name == "shm" else "shm")
    with pytest.raises(HandoverFailed):
        other.fetch(transport.publish(TENSORS)[0])


def test_shm_carries_descriptors_and_no_bytes():
    assert ShmTransport().publish(TENSORS) is TENSORS


def test_tensors_too_large_for_inline_are_a_failed_handover():
    with pytest.raises(HandoverFailed, match="32 bytes are more than 31"):
        InlineTransport(View().tensor, max_bytes=31).publish(TENSORS)


def test_arena_that_is_not_mapped_is_a_failed_handover():
    receiver = ShmReceiver()
    receiver.add(RANGE.arena, View())
    receiver.remove(RANGE.arena)
    with pytest.raises(HandoverFailed, match="not mapped"):
        receiver.fetch(TENSORS[0])


def test_inline_tensor_of_the_wrong_size_cannot_be_built():
    with pytest.raises(ValueError, match="3 bytes"):
        InlineTensor(TensorSpec("uint8", (4,)), b"abc")
