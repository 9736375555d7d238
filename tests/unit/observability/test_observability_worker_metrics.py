import math

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from medialane.observability import MetricMirror, MetricReader, Metrics, engine_metrics
from medialane.types.stats import MetricChanges, MetricFamily, MetricSeries


class Pair:
    """A worker's registry and the memory of its processes, and a gateway's mirror of them."""

    def __init__(self, **limits):
        self.registry, self.memory = CollectorRegistry(), {}
        self.reader = MetricReader(self.registry, lambda: self.memory, **limits)
        self.mirror = MetricMirror(**limits)

    def read(self):
        """Bring the mirror up to date; what travelled."""
        pieces = [msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=MetricChanges) for p in self.reader.read()]
        for piece in pieces:
            self.mirror.apply(piece)
        return pieces

    def value(self, sample, **labels):
        found = [v for _, s, v in self.mirror.samples() if (s.name, s.labels) == (sample, labels)]
        return found[0] if found else None


@pytest.fixture
def pair():
    return Pair()


def shown(**mirrors):
    """The response to a scrape of the gateway."""
    registry = CollectorRegistry()
    Metrics(registry).watch(lambda: engine_metrics(mirrors))
    return generate_latest(registry).decode()


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_worker_metrics_equal_those_of_its_own_server(pair):
    labels = {"model_name": "m", "engine": "0"}
    Counter("vllm:prompt_tokens", "Tokens", list(labels), registry=pair.registry).labels(**labels).inc(7)
    Gauge("vllm:num_requests_running", "Running", list(labels), registry=pair.registry).labels(**labels).set(2)
    latency = Histogram("vllm:ttft_seconds", "TTFT", list(labels), buckets=(0.1, 1), registry=pair.registry)
    latency.labels(**labels).observe(0.5)
    pair.read()
    theirs = {n: f for n, f in families(generate_latest(pair.registry).decode()).items() if n.startswith("vllm:")}
    ours = {n: f for n, f in families(shown(w0=pair.mirror)).items() if n.startswith("vllm:")}
    assert ours.keys() == theirs.keys()
    for name, family in theirs.items():
        assert (ours[name].type, ours[name].documentation) == (family.type, family.documentation)
        with_worker = [(s.name, {**s.labels, "worker": "w0"}, s.value) for s in family.samples]
        assert [tuple(s[:3]) for s in ours[name].samples] == with_worker


def test_help_of_times_that_begin_at_the_worker_says_what_they_leave_out(pair):
    for name in ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"):
        Histogram(name, "Its help.", registry=pair.registry).observe(1)
    pair.read()
    found = families(shown(w0=pair.mirror))
    first, other = (
        found[f"vllm:{name}_seconds"].documentation for name in ("time_to_first_token", "inter_token_latency")
    )
    assert first.startswith("Its help. Begins at the worker: ")
    assert "medialane_time_to_first_token_seconds" in first
    assert other == "Its help."


def test_metric_families_of_workers_are_merged(pair):
    other = Pair()
    for number, one in enumerate((pair, other), 1):
        Counter("vllm:prompt_tokens", "Tokens", registry=one.registry).inc(number)
        one.read()
    text = shown(w0=pair.mirror, w1=other.mirror)
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == 1
    values = {s.labels["worker"]: s.value for s in families(text)["vllm:prompt_tokens"].samples}
    assert (values["w0"], values["w1"]) == (1, 2)


def test_only_changes_are_sent(pair):
    counter = Counter("vllm:a", "A", ["engine"], registry=pair.registry)
    counter.labels("0").inc()
    counter.labels("1").inc()
    assert len(pair.read()[0].series) == 4
    assert pair.read() == [MetricChanges()]
    counter.labels("1").inc(2)
    (_, values) = pair.read()
    assert (values.series, len(values.ids), len(values.values)) == ((), 4, 8)
    assert (pair.value("vllm:a_total", engine="0"), pair.value("vllm:a_total", engine="1")) == (1, 3)


def test_series_may_appear_and_disappear(pair):
    gauge = Gauge("vllm:lora", "Adapters", ["name"], registry=pair.registry)
    gauge.labels("a").set(1)
    pair.read()
    gauge.remove("a")
    gauge.labels("b").set(2)
    Gauge("vllm:later", "Later", registry=pair.registry).set(3)
    pair.read()
    assert (pair.value("vllm:lora", name="a"), pair.value("vllm:lora", name="b")) == (None, 2)
    assert pair.value("vllm:later") == 3
    gauge.labels("a").set(4)
    pair.read()
    assert pair.value("vllm:lora", name="a") == 4


def test_only_vllm_families_are_sent(pair):
    Counter("python_gc", "GC", registry=pair.registry).inc()
    pair.read()
    assert len(pair.mirror) == 0
    assert "python_gc" not in shown(w0=pair.mirror)


def test_nan_and_infinite_values_are_exposed(pair):
    Gauge("vllm:a", "A", registry=pair.registry).set(math.nan)
    Gauge("vllm:b", "B", registry=pair.registry).set(math.inf)
    pair.read()
    assert math.isnan(pair.value("vllm:a"))
    assert pair.value("vllm:b") == math.inf


def test_many_series_are_sent_in_chunks(pair):
    most = 2048
    gauge = Gauge("vllm:a", "A", ["n"], registry=pair.registry)
    for number in range(2 * most + 1):
        gauge.labels(str(number)).set(number)
    pieces = pair.read()
    assert max(len(p.series) for p in pieces) == max(len(p.ids) // 4 for p in pieces) == most
    assert pair.value("vllm:a", n=str(2 * most)) == 2 * most


def test_series_over_the_limit_are_dropped():
    pair = Pair(max_series=3)
    gauge = Gauge("vllm:a", "A", ["n"], registry=pair.registry)
    for number in range(5):
        gauge.labels(str(number)).set(1)
    pair.read()
    assert (len(pair.mirror), pair.reader.num_dropped) == (3, 2)


def test_memory_is_mirrored_and_kept_while_it_is_unknown(pair):
    pair.memory = {"worker": 7, "engine": 8}
    assert len(pair.read()) == 1
    assert pair.mirror.memory == {"worker": 7, "engine": 8}
    pair.memory = {}
    pair.read()
    assert pair.mirror.memory == {"worker": 7, "engine": 8}


def test_memory_of_an_unknown_kind_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([[], [], b"", b"", b"", {"x": 1}]), type=MetricChanges)


def test_reader_of_a_new_connection_starts_with_everything(pair):
    Counter("vllm:a", "A", registry=pair.registry).inc(5)
    pair.read()
    pair.reader, pair.mirror = MetricReader(pair.registry), MetricMirror()
    pair.read()
    assert pair.value("vllm:a_total") == 5


A = MetricFamily("vllm:a", "A", "gauge")
SERIES = MetricSeries(0, "vllm:a", {})


@pytest.mark.parametrize(
    "changes",
    [
        MetricChanges(series=(SERIES,)),
        MetricChanges((A,), (MetricSeries(-1, "vllm:a", {}),)),
        MetricChanges((A,), (SERIES,), ids=bytes(4)),
        MetricChanges((A,), (SERIES,), ids=b"\1\0\0\0", values=bytes(8)),
        MetricChanges((A,), (SERIES,), ids=bytes(3), values=bytes(8)),
        MetricChanges((A,), (SERIES,), removed=b"\7\0\0\0"),
        MetricChanges((A,), (SERIES,) * 9),
        MetricChanges((A,) * 9),
        MetricChanges((MetricFamily("vllm:a", "A", "speedometer"),)),
        MetricChanges((MetricFamily("medialane_arena_bytes", "A", "gauge"),)),
        MetricChanges((A,), (MetricSeries(0, "vllm:a 1\nup", {}),)),
        MetricChanges((A,), (MetricSeries(0, "vllm:a", {'a="1"} 1\nup{b': "2"}),)),
    ],
)
def test_malformed_changes_raise_and_change_nothing(changes):
    mirror = MetricMirror(max_series=8)
    with pytest.raises(ValueError, match=r".+"):
        mirror.apply(changes)
    assert list(mirror.samples()) == []
    mirror.apply(MetricChanges((A,), (SERIES,), ids=bytes(4), values=bytes(8)))
    assert len(mirror) == 1
