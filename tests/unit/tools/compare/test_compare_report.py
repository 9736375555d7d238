"""What is shown of a report, whatever the figures and texts."""

import io

import msgspec
import pytest
from rich.console import Console

from medialane.tools.compare import (
    Pace,
    Reply,
    Served,
    Side,
    Slo,
    Traffic,
    TrafficComparison,
    TrafficRequest,
    Turn,
    make_report,
    show,
)

NAME = "[/red] a name"


def reply(number, text="one two", **members):
    fields = {"ttft_s": 0.1 * (number + 1), "tpot_s": 0.01, "num_tokens": 2, "text": text, **members}
    return Reply(number, fields.pop("status", 200), number * 0.5, 1.0, **fields)


async def never_run(_number):
    raise AssertionError


def report_of(first, second):
    traffic = Traffic("OpenAI batch", tuple(TrafficRequest(f"r{n}", None, dict) for n in range(9)))
    turns = (
        [Turn(first, is_whole=True, wall_s=2.0, cpu_s=1.0)],
        [Turn(second, is_whole=True, wall_s=2.0, cpu_s=None)],
    )
    sides = Side("plain", never_run), Side(NAME, never_run)
    comparison = TrafficComparison(traffic=traffic, sides=sides, pace=Pace(concurrency=1), turns=turns)
    return make_report(comparison, model="m", requests="f", vllm_flags=(), slo=Slo(), measured_on={})


def shown(first, second):
    console = Console(file=io.StringIO(), width=200)
    show(report_of(first, second), console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        pytest.param([], [], "answers: none to compare", id="nothing"),
        pytest.param([reply(0)], [reply(0)], "answers: 1 of 1 equal", id="one"),
        pytest.param(
            [reply(0, status=400, error="[/b] no")], [reply(0, status=0, error="gone")], "1 x 400: [/b] no", id="errors"
        ),
        pytest.param([reply(0, ttft_s=None, tpot_s=None, num_tokens=0)], [], "whole answer p50", id="documents"),
        pytest.param(
            [reply(0)],
            [reply(0, served=Served(("hit",), ("loaded",), "features", "shm", 9, {"fetch": 0.001, "decode": 3.0}))],
            f"{NAME}, mean time: decode 3 ms\n",
            id="steps",
        ),
    ],
)
def test_report_is_shown_whatever_is_known(first, second, said):
    text = shown(first, second)
    assert NAME in text
    assert said in text
    assert "nan" not in text


def test_report_shows_where_answers_part():
    first = [reply(0, "the sea is calm", token_ids=(1, 2, 3, 4))]
    second = [reply(0, "the sea is wild", token_ids=(1, 2, 3, 5))]
    assert "r0: equal for 3 of 4 tokens: 'calm', 'wild'" in shown(first, second)


def test_report_is_json_that_can_be_read_back():
    report = report_of([reply(0)], [reply(0, "else")])
    document = msgspec.json.encode(report)
    assert msgspec.json.decode(document, type=type(report)) == report


def test_text_decides_where_a_server_returns_no_token_ids():
    report = report_of([reply(0, "a b", token_ids=(1, 2))], [reply(0, "a b")])
    assert report.agreement.counts == {"equal": 1}
