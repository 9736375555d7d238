import pytest
import torch

from medialane.core.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.vllm_bridge.arena_decoder import META
from medialane.vllm_bridge.arena_encoder import ArenaConsumer

SPEC = TensorSpec("uint8", (4, 64))
ENTRY = ArenaRange("a" * 32, 4096, 4096, 7)
DESCRIPTOR = TensorDescriptor(SPEC, ENTRY, 128)


@pytest.fixture
def data():
    return memoryview(bytearray(SPEC.nbytes * 2))


def tensor_of(data):
    return torch.frombuffer(data, dtype=torch.uint8)


def test_offered_bytes_are_replaced_by_where_they_lie(data):
    consumer = ArenaConsumer(None)
    half = data[: SPEC.nbytes]
    with consumer.offering([(DESCRIPTOR, half)]):
        assert consumer(tensor_of(half).view(4, 64)) == {META: ["a" * 32, 4096, 4096, 7, 128]}


def test_other_tensors_are_left_to_vllm(data):
    consumer = ArenaConsumer(None)
    half = data[: SPEC.nbytes]
    with consumer.offering([(DESCRIPTOR, half)]):
        assert consumer(tensor_of(data)) is None, "another size"
        assert consumer(tensor_of(data[64:])) is None, "another place"
        assert consumer(tensor_of(half).view(4, 64).t()) is None, "strided"
        assert consumer(torch.zeros(256, dtype=torch.uint8)) is None
    assert consumer(tensor_of(half)) is None, "no longer offered"


def test_two_requests_may_offer_the_same_entry(data):
    consumer = ArenaConsumer(None)
    half = data[: SPEC.nbytes]
    with consumer.offering([(DESCRIPTOR, half)]):
        with consumer.offering([(DESCRIPTOR, half)]):
            pass
        assert consumer(tensor_of(half)) is not None
    assert not consumer._offered


def test_offer_ends_when_its_request_fails(data):
    consumer = ArenaConsumer(None)
    with pytest.raises(ValueError, match="why"), consumer.offering([(DESCRIPTOR, data)]):
        raise ValueError("why")
    assert not consumer._offered


def test_vllms_own_consumer_gets_the_rest(data):
    class Inner:
        messages = 0

        def __call__(self, tensor):
            return {"inner": tensor.numel()}

        def new_message(self):
            self.messages += 1

    inner = Inner()
    consumer = ArenaConsumer(inner)
    consumer.new_message()
    assert inner.messages == 1
    assert consumer(torch.zeros(3)) == {"inner": 3}
