import asyncio

import msgspec
import pytest

from medialane.gateway.workers import RemoteRequest
from medialane.types.errors import GenerationFailed, TooLarge
from medialane.types.feature import MediaSpan
from medialane.types.request import OutputDelta, PooledPart
from medialane.types.tensor import TensorSpec
from medialane.wire import PooledOutput

SPEC = TensorSpec("float32", (2, 3))
DATA = bytes(range(24))


def part(start, end, *, finished=None, spec=SPEC, **fields):
    finished = end == len(DATA) if finished is None else finished
    return OutputDelta("r", [], finished=finished, pooled=PooledPart(spec, memoryview(DATA[start:end])), **fields)


def test_parts_become_one_output_with_what_the_first_one_says():
    output = PooledOutput(1000)
    placed = (MediaSpan("a", 1, 2, "image", 2),)
    assert output.add(part(0, 10, prompt_token_ids=[1, 2], placed=placed, num_cached_tokens=1)) is None
    assert output.add(part(10, 20)) is None
    whole = output.add(part(20, 24))
    assert whole.finished
    assert whole.pooled == PooledPart(SPEC, DATA)
    assert (whole.prompt_token_ids, whole.placed, whole.num_cached_tokens) == ([1, 2], placed, 1)


def test_empty_tensor_is_one_part():
    spec = TensorSpec("float32", (0,))
    whole = PooledOutput(1000).add(part(0, 0, finished=True, spec=spec))
    assert whole.pooled.spec == spec
    assert not whole.pooled.data.nbytes


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 10, finished=True)],
        [part(0, 24, finished=False)],
        [part(0, 20), part(0, 10, finished=True)],
        [part(0, 10), part(10, 24, spec=TensorSpec("float32", (6,)))],
        [OutputDelta("r", [], finished=True)],
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(parts):
    output = PooledOutput(1000)
    *before, last = parts
    for found in before:
        output.add(found)
    with pytest.raises(GenerationFailed):
        output.add(last)


def test_memory_for_a_tensor_above_the_limit_is_never_allocated():
    huge = TensorSpec("float32", (1 << 40,))
    with pytest.raises(TooLarge, match="rpc-max-pooled-bytes"):
        PooledOutput(1000).add(part(0, 10, finished=False, spec=huge))


def test_part_survives_the_wire():
    sent = part(0, 24)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=OutputDelta) == sent


async def test_request_yields_its_parts_as_one_delta_whatever_the_limit_of_queued_bytes():
    aborts = []
    remote = RemoteRequest("r", max_queued_bytes=1, pooled=PooledOutput(1000), send_abort=aborts.append)
    reading = asyncio.create_task(anext(remote))
    for start in range(0, 24, 8):
        remote.on_output(part(start, start + 8), 1000)
    assert (await reading).pooled.data == DATA
    with pytest.raises(StopAsyncIteration):
        await anext(remote)
    assert aborts == []


async def test_request_with_too_large_an_output_is_aborted():
    aborts = []
    remote = RemoteRequest("r", max_queued_bytes=1, pooled=PooledOutput(10), send_abort=aborts.append)
    remote.on_output(part(0, 10), 10)
    with pytest.raises(TooLarge):
        await anext(remote)
    assert aborts == ["r"]
