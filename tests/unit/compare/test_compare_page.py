"""The page of a report: complete in itself, whatever the figures and texts."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from medialane.compare.agreement import agreement
from medialane.compare.journal import Manifest, Turn, TurnFacts
from medialane.compare.page import page_of
from medialane.compare.reply import Reply, Served
from medialane.compare.report import make_report
from medialane.compare.summary import Slo
from medialane.compare.traffic import Traffic, TrafficRequest

EVIL = "</script><script>alert(1)</script>\"'&"


def traffic(count):
    return Traffic("chat bodies", tuple(TrafficRequest(f"r{n}", None, dict) for n in range(count)), "digest")


def reply(number, text="one two", **members):
    fields = {"ttft_s": 0.1 * (number + 1), "tpot_s": 0.01, "num_tokens": 2, "text": text, **members}
    return Reply(number, fields.pop("status", 200), number * 0.5, 1.0, **fields)


def report_of(first, second, *, name=EVIL):
    manifest = Manifest(
        model=name, requests="f", digest="d", num_requests=9, sides=("plain", name), vllm_flags=(name,), pace="p",
        as_sent=False,
    )  # fmt: skip
    turns = [
        [Turn(TurnFacts(side, 1, is_whole=True, wall_s=2.0, cpu_s=cpu_s, num_parts=1), tuple(replies))]
        for side, replies, cpu_s in (("plain", first, 1.0), (name, second, None))
    ]
    return make_report(
        manifest, traffic(9), turns, slo=Slo(), rounds=1, measured_on={"cpu": EVIL, "memory_bytes": 1 << 34}
    ), turns


class Tags(HTMLParser):
    """What would be loaded, and whether every element ends."""

    VOID = frozenset({"meta", "line", "path", "polyline"})

    def __init__(self, page):
        super().__init__()
        self.loaded, self.open, self.num_scripts = [], [], 0
        self.feed(page)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        self.num_scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("p", "li") and tag not in self.open:
            return
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([reply(0)], [reply(0)], id="one"),
        pytest.param([reply(0, status=400, error=EVIL)], [reply(0, status=0, error=EVIL)], id="errors"),
        pytest.param([reply(0, ttft_s=None, tpot_s=None, num_tokens=0)] * 2, [], id="documents"),
        pytest.param(
            [reply(n, f"same {EVIL}") for n in range(9)],
            [
                reply(n, EVIL, served=Served(("hit", "miss"), ("loaded",), "features", "shm", 9, {EVIL: 3.0}))
                for n in range(9)
            ],
            id="hostile",
        ),
        pytest.param([reply(n, ttft_s=10.0 ** (n - 4)) for n in range(9)], [reply(n) for n in range(9)], id="wide"),
    ],
)
def test_page_is_whole_and_loads_nothing(first, second):
    page = page_of(*report_of(first, second))
    tags = Tags(page)
    assert tags.loaded == []
    assert tags.num_scripts == 1
    assert tags.open == ["html", "body"]
    assert not re.search(r"https?:|@import|url\(", page)
    assert "nan" not in page.lower().replace("finance", "")


def test_page_shows_where_answers_part():
    first = [reply(0, "the sea is calm", token_ids=(1, 2, 3, 4))]
    second = [reply(0, "the sea is wild", token_ids=(1, 2, 3, 5))]
    page = page_of(*report_of(first, second, name="ours"))
    assert "equal for 3 of 4 tokens" in page
    assert "<mark>calm</mark>" in page
    assert "<mark>wild</mark>" in page


def test_report_is_json_that_can_be_read_back():
    report, _ = report_of([reply(0)], [reply(0, "else")])
    document = msgspec.json.encode(report)
    assert msgspec.json.decode(document, type=type(report)) == report


def test_text_decides_where_a_server_returns_no_token_ids():
    found = agreement(traffic(1), [reply(0, "a b", token_ids=(1, 2))], [reply(0, "a b")])
    assert found.counts == {"equal": 1}
