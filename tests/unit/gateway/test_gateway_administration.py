"""Administrative calls go to every worker and complete when all have completed."""

import pytest

from medialane.gateway import WorkerPool
from medialane.gateway.request.app_backend import MAX_NAMED, administer
from medialane.testing.fake_worker import FakeLink
from medialane.types.admin import (
    AddLora,
    IsSleeping,
    PauseGeneration,
    ResetEncoderCache,
    ResetPrefixCache,
    Sleep,
    StopProfile,
    WakeUp,
)
from medialane.types.errors import AdminCallIncomplete, GenerationFailed, InvalidRequest, NoWorkerReady, WorkerLost

LOST = object()


class Workers:
    """Workers that give these answers; LOST are not connected."""

    def __init__(self, *answers):
        self.links = [FakeLink(f"unix:/w{number}", admin_result=answer) for number, answer in enumerate(answers)]
        self.pool = WorkerPool(self.links)
        for link in self.links:
            if link.worker.admin_result is not LOST:
                link.join()

    async def do(self, call):
        return await administer(self.pool, call, timeout_s=7)

    @property
    def calls(self):
        workers = [link.client for link in self.links if link.client is not None]
        return [[message.call for message in worker.sent] for worker in workers]


async def test_every_worker_is_called_and_results_are_in_order():
    workers = Workers(True, False, True)
    assert await workers.do(ResetPrefixCache()) == [True, False, True]
    assert workers.calls == [[ResetPrefixCache()]] * 3


@pytest.mark.parametrize("failure", [GenerationFailed("out of memory"), WorkerLost("gone"), LOST])
async def test_error_names_the_failed_workers(failure):
    workers = Workers(None, failure, None)
    with pytest.raises(
        AdminCallIncomplete, match=r"2 of 3 workers executed the call; failed: unix:/w1 \(.+\)"
    ) as failed:
        await workers.do(Sleep())
    assert "w0" not in failed.value.message
    assert failed.value.status == 503
    assert all(calls == [Sleep()] for calls in workers.calls)  # a failing worker does not prevent the others


@pytest.mark.parametrize(
    ("call", "concerned"),
    [
        (Sleep(), True),
        (WakeUp(), True),
        (ResetEncoderCache(), True),
        (StopProfile(), True),
        (ResetPrefixCache(), False),
        (IsSleeping(), False),
        (PauseGeneration(), False),
        (AddLora(b"x"), False),
    ],
)
async def test_encoders_get_calls_about_memory_weights_and_encoder_but_not_about_generation(call, concerned):
    workers = Workers(True, True)
    workers.links[1].role = "encoder"
    assert await workers.do(call) == [True] * (1 + concerned)
    assert [list(map(type, calls)) for calls in workers.calls] == [[type(call)], [type(call)] * concerned]


@pytest.mark.parametrize(("call", "changes"), [(ResetEncoderCache(), True), (Sleep(2), True), (Sleep(1), False)])
async def test_encoders_of_all_workers_change_alike(call, changes):
    """With digests of their own, workers would not load each other's embeddings any more."""
    workers = Workers(True, True, True)
    workers.links[2].role = "encoder"
    for _ in range(2):
        await workers.do(call)
    salts = [[each.salt for each in calls] for calls in workers.calls]
    assert salts[0] == salts[1] == salts[2]
    assert len(set(salts[0]) - {""}) == (2 if changes else 0)


async def test_lost_encoder_does_not_make_a_call_incomplete():
    workers = Workers(True, LOST)
    workers.links[1].role = "encoder"
    assert await workers.do(Sleep()) == [True]


async def test_equal_rejection_by_all_workers_is_a_client_error():
    refusal = InvalidRequest("no such profile")
    with pytest.raises(InvalidRequest, match="no such profile"):
        await Workers(refusal, InvalidRequest("no such profile")).do(Sleep())
    with pytest.raises(AdminCallIncomplete):
        await Workers(refusal, None).do(Sleep())


async def test_error_for_many_workers_stays_short():
    workers = Workers(*[GenerationFailed("failed")] * (MAX_NAMED + 5))
    with pytest.raises(AdminCallIncomplete, match=f"unix:/w{MAX_NAMED - 1} .* and 5 more") as failed:
        await workers.do(Sleep())
    assert f"w{MAX_NAMED} " not in failed.value.message


async def test_adapter_is_loaded_on_ready_workers():
    workers = Workers(True, LOST)
    assert await workers.do(AddLora(b"x")) == [True]
    with pytest.raises(NoWorkerReady):
        await Workers(LOST, LOST).do(AddLora(b"x"))


async def test_adapter_failing_on_one_worker_is_a_failure():
    with pytest.raises(AdminCallIncomplete, match="No adapter found"):
        await Workers(True, GenerationFailed("No adapter found for /a")).do(AddLora(b"x"))


async def test_worker_that_does_not_answer_is_named_after_the_timeout():
    workers = Workers(True, True)
    workers.links[1].worker.is_silent = True
    with pytest.raises(AdminCallIncomplete, match=r"1 of 2 .*unix:/w1 \(no response within 0.01 s\)"):
        await administer(workers.pool, Sleep(), timeout_s=0.01)
