"""Load by data-parallel rank: what vLLM's stat loggers receive and what the worker reports."""

from types import SimpleNamespace

from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
from vllm.v1.metrics.stats import SchedulerStats

from medialane.types.request import WorkerLoad
from medialane.vllm_bridge.engine.engine import LoadRecorder
from medialane.vllm_bridge.seams.engine import num_unfinished_by_rank


def logger_of(recorder, engine_indexes):
    """As vLLM's StatLoggerManager makes it."""
    return PerEngineStatLoggerAdapter(
        vllm_config=None, engine_indexes=engine_indexes, per_engine_stat_logger_factory=recorder.factory
    )


def stats(num_running, usage):
    return SchedulerStats(num_running_reqs=num_running, kv_cache_usage=usage)


def test_load_is_tracked_per_rank():
    recorder = LoadRecorder()
    logger = logger_of(recorder, [0, 1])
    logger.record(stats(3, 0.5), None, engine_idx=0)
    logger.record(stats(1, 0.25), None, engine_idx=1)
    logger.record(None, None, engine_idx=1)
    assert recorder.loads([4, 1]) == [WorkerLoad(3, 1, 0.5), WorkerLoad(1, 0, 0.25)]


def test_ranks_not_starting_at_zero_are_ordered():
    recorder = LoadRecorder()
    logger = logger_of(recorder, [2, 3])
    logger.record(stats(3, 0.5), None, engine_idx=3)
    assert recorder.loads([1, 4]) == [WorkerLoad(0, 1, 0.0), WorkerLoad(3, 1, 0.5)]


def unfinished(requests, identities):
    """The requests of each rank of an engine with these identities; `requests` assigns them to ranks."""
    core = SimpleNamespace(core_engines=identities, reqs_in_flight=requests)
    states = dict.fromkeys([*requests, "not sent yet"])
    llm = SimpleNamespace(engine_core=core, output_processor=SimpleNamespace(request_states=states))
    return num_unfinished_by_rank(llm)


def test_requests_are_counted_without_vllms_statistics():
    """As running ones: nothing says that they wait, and requests must not wait for them to begin."""
    assert LoadRecorder().loads(unfinished({"a": b"0", "b": b"1"}, [b"0", b"1"])) == [WorkerLoad(1), WorkerLoad(1)]


def test_requests_are_counted_at_their_rank():
    recorder = LoadRecorder()
    logger = logger_of(recorder, [0, 1, 2])
    logger.record(stats(2, 0.5), None, engine_idx=0)
    logger.record(stats(7, 0.75), None, engine_idx=2)  # of its last step: it has none left
    counts = unfinished({"a": b"0", "b": b"0", "c": b"0", "d": b"1"}, [b"0", b"1", b"2"])
    assert recorder.loads(counts) == [WorkerLoad(2, 1, 0.5), WorkerLoad(0, 1, 0.0), WorkerLoad()]
