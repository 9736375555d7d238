"""Whole comparisons of two servers that run already."""

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from fake_vllm import CHAT, FakeVllm
from rich.console import Console

from medialane.tools.check import CheckProgress, Launch
from medialane.tools.compare import Pace, Slo, TrafficComparison, make_report, read_traffic, sides_of
from medialane.types.errors import StartupFailed
from waiting import eventually


class WrongAbout(FakeVllm):
    """Gives another answer to prompts with this word, from the third token on."""

    def __init__(self, word, **settings):
        super().__init__(**settings)
        self._word = word

    def tokens(self, body):
        tokens = super().tokens(body)
        return tokens[:2] + [token + 1 for token in tokens[2:]] if self._word in str(body) else tokens


class Slow(FakeVllm):
    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()

    async def before(self, body):
        if "slow" in str(body):
            await self.gate.wait()


def chat(words, at=None, **body):
    line = {"custom_id": words, "url": CHAT, "body": {"messages": [{"role": "user", "content": words}], **body}}
    return line if at is None else {**line, "medialane": {"at": at}}


def speech(url):
    return {"custom_id": "s", "url": "/v1/audio/transcriptions", "body": {"file_url": url}}


def quiet():
    return CheckProgress(Console(quiet=True))


class Compared:
    """A comparison of two fake servers, in a folder."""

    def __init__(self, tmp_path, file, urls, *, pace, rounds=1):
        self.traffic = read_traffic(file, media=tmp_path / "media")
        launch = Launch(model="m", vllm_args=(), environ={}, own_environ={}, logs=tmp_path)
        names = [f"{name}={url}" for name, url in zip(("one", "other"), urls, strict=True)]
        self.comparison = TrafficComparison(
            traffic=self.traffic, sides=sides_of(names, launch, quiet()), pace=pace, rounds=rounds
        )
        self.folder = tmp_path / "out"

    async def run(self):
        await self.comparison.run(self.folder, quiet())

    def report(self, **slo):
        return make_report(self.comparison, model="m", requests="f", vllm_flags=(), slo=Slo(**slo), measured_on={})


@pytest.fixture
async def compared(tmp_path):
    """Compare two servers with a file; the comparison may be run."""
    async with AsyncExitStack() as stack:

        async def compared(file, one, other, *, pace=Pace(concurrency=2), rounds=1):  # noqa: B008 - frozen
            urls = [await stack.enter_async_context(server.served()) for server in (one, other)]
            return Compared(tmp_path, file, urls, pace=pace, rounds=rounds)

        yield compared


async def test_equal_answers_and_their_figures(compared, traffic_file):
    file = traffic_file(*(chat(f"prompt {n}", max_tokens=5, temperature=0.7, n=2) for n in range(6)))
    one, other = FakeVllm(), FakeVllm(reports=True)
    comparison = await compared(file, one, other)
    await comparison.run()
    report = comparison.report()
    assert report.is_whole
    assert report.agreement.counts == {"equal": 6}
    assert [side.num_succeeded for side in report.sides] == [6, 6]
    assert [side.output_tokens for side in report.sides] == [30, 30]
    assert [side.prefix_share for side in report.sides] == [0.25, 0.25]
    assert report.baseline.caches == {}
    assert report.other.caches == {"hit": 6}
    assert report.other.copied_bytes == 300
    assert report.other.steps_ms == {"route": 1.5, "prefill": 20.0}
    assert 0 < report.baseline.ttft_s.p50 < report.baseline.seconds.p50
    assert report.baseline.goodput_per_s > 0


async def test_requests_are_sent_greedy_and_streamed_to_the_served_model(compared, traffic_file):
    one, other = FakeVllm(), FakeVllm()
    comparison = await compared(traffic_file(chat("a", temperature=0.7, top_p=0.1, n=2, model="x")), one, other)
    await comparison.run()
    (body,) = one.bodies
    assert other.bodies == one.bodies
    assert (body["model"], body["temperature"], body["n"], body["stream"]) == ("served-name", 0, 1, True)
    assert "top_p" not in body


async def test_answers_that_part_are_shown_with_where(compared, traffic_file):
    file = traffic_file(*(chat(word, max_tokens=4) for word in ("alpha", "beta", "gamma")))
    comparison = await compared(file, FakeVllm(), WrongAbout("beta"))
    await comparison.run()
    report = comparison.report()
    assert report.agreement.counts == {"equal": 2, "parts": 1}
    (parting,) = report.agreement.partings
    assert (parting.id, parting.position, parting.length) == ("beta", 2, 4)
    assert parting.common.startswith("w")
    assert parting.baseline != parting.other


async def test_requests_that_both_refuse_are_no_difference(compared, traffic_file):
    comparison = await compared(traffic_file(chat("refuse this"), chat("b")), FakeVllm(), FakeVllm())
    await comparison.run()
    report = comparison.report()
    assert report.agreement.counts == {"refused": 1, "equal": 1}
    assert report.baseline.errors == {"400: no such thing": 1}


async def test_documents_are_compared_but_for_what_differs_anyway(compared, traffic_file):
    file = traffic_file({"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "words"}})
    comparison = await compared(file, FakeVllm(), FakeVllm())
    await comparison.run()
    assert comparison.report().agreement.counts == {"equal": 1}


async def test_goodput_counts_what_keeps_the_slo(compared, traffic_file):
    comparison = await compared(traffic_file(chat("a"), chat("b")), FakeVllm(), FakeVllm())
    await comparison.run()
    assert comparison.report().baseline.slo_share == 1
    assert comparison.report(ttft_s=1e-9).baseline.slo_share == 0


async def test_requests_are_sent_at_their_times(compared, traffic_file):
    arrivals = []

    class Arriving(FakeVllm):
        async def before(self, body):
            arrivals.append(time.perf_counter())

    file = traffic_file(chat("a", at=50.0), chat("b", at=50.6), chat("c", at=50.9))
    comparison = await compared(file, Arriving(), FakeVllm(), pace=Pace(speed=2))
    await comparison.run()
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert gaps == pytest.approx([0.3, 0.15], abs=0.12)


async def test_second_round_says_what_a_server_differs_by_from_itself(compared, traffic_file):
    class Moody(FakeVllm):
        def tokens(self, body):
            return [int(len(self.bodies) > 2), 1]

    comparison = await compared(traffic_file(chat("a"), chat("b")), Moody(), FakeVllm(), rounds=2)
    await comparison.run()
    report = comparison.report()
    assert report.itself["one"].counts == {"parts": 2}
    assert report.itself["other"].counts == {"equal": 2}
    assert report.baseline.num_requests == 4


async def test_interrupted_comparison_reports_what_was_measured(compared, traffic_file):
    file = traffic_file(*(chat(f"p{n}") for n in range(4)), chat("slow one"), chat("last"))
    other = Slow()
    comparison = await compared(file, FakeVllm(), other, pace=Pace(concurrency=1))
    running = asyncio.create_task(comparison.run())
    await eventually(lambda: len(other.bodies) == 5, "the slow request was sent")
    running.cancel()
    await asyncio.wait([running])
    report = comparison.report()
    assert not report.is_whole
    assert [side.num_requests for side in report.sides] == [6, 4]
    assert report.agreement.counts == {"equal": 4}
    assert [len(path.read_text().splitlines()) for path in sorted(comparison.folder.iterdir())] == [6, 4]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        pytest.param(chat("medialane:sample/image/zz"), "line 1: medialane:sample/image/zz names no media", id="media"),
        pytest.param(speech("https://host/a.wav"), "file_url is not a data: URL with base64", id="file elsewhere"),
        pytest.param(speech("data:audio/wav;base64,Zm9"), "file_url is not base64", id="file cut off"),
    ],
)
async def test_line_that_cannot_be_sent_is_a_failed_request(compared, traffic_file, line, error):
    comparison = await compared(traffic_file(line, chat("b")), FakeVllm(), FakeVllm())
    await comparison.run()
    report = comparison.report()
    (reason,) = report.baseline.errors
    assert error in reason
    assert report.agreement.counts == {"answered_by_one": 1, "equal": 1}


@pytest.mark.parametrize("text", ["ftp://host", "name=", "=http://host", "host:8000"])
def test_address_that_is_none_is_refused(tmp_path, text):
    launch = Launch(model="m", vllm_args=(), environ={}, own_environ={}, logs=tmp_path)
    with pytest.raises(StartupFailed, match="--against"):
        sides_of([text], launch, quiet())


async def test_folder_that_cannot_be_written_to_is_named(compared, traffic_file):
    comparison = await compared(traffic_file(chat("a")), FakeVllm(), FakeVllm())
    (comparison.folder / "turn-1-0.jsonl").mkdir(parents=True)
    with pytest.raises(StartupFailed, match=r"--out .*/out: Is a directory"):
        await comparison.run()
