import asyncio

import pytest

from medialane.runtime.tasks import first_of, gather_or_cancel
from medialane.types.errors import InvalidRequest
from waiting import iterations


class Work:
    """Coroutines that end when told; `cancelled` are the cancelled ones."""

    def __init__(self):
        self.cancelled = []

    async def endless(self, name="endless"):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def fail(self, error):
        raise error

    async def give(self, value):
        await asyncio.sleep(0)
        return value


@pytest.fixture
def work():
    return Work()


async def test_first_one_that_ends_cancels_the_others(work):
    await first_of(work.endless("a"), work.give(1), work.endless("b"))
    assert work.cancelled == ["a", "b"]


async def test_error_of_the_first_one_is_raised_and_what_is_shielded_runs_on(work):
    shielded = asyncio.create_task(work.endless("shielded"))
    with pytest.raises(ValueError, match="a bug"):
        await first_of(work.fail(ValueError("a bug")), asyncio.shield(shielded))
    assert not shielded.done()
    shielded.cancel()
    await asyncio.wait([shielded])


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
async def test_results_are_in_order(work, values):
    assert await gather_or_cancel([work.give(value) for value in values]) == tuple(values)


@pytest.mark.parametrize("error", [InvalidRequest("no"), ValueError("a bug")])
async def test_first_error_cancels_the_others_and_is_raised_with_its_cause(work, error):
    error.__cause__ = cause = OSError("why")
    with pytest.raises(type(error)) as raised:
        await gather_or_cancel([work.endless(), work.fail(error)])
    assert (raised.value, raised.value.__cause__) == (error, cause)
    assert work.cancelled == ["endless"]


async def test_cancellation_reaches_all(work):
    gathering = asyncio.create_task(gather_or_cancel([work.endless("a"), work.endless("b")]))
    await iterations(5)
    gathering.cancel()
    await asyncio.wait([gathering])
    assert sorted(work.cancelled) == ["a", "b"]
