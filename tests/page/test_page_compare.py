"""The report of `medialane compare` in a browser."""

import json

import pytest
from contrast import CONTRASTS, LEAST_CONTRAST

from medialane.compare.journal import Manifest, Turn, TurnFacts
from medialane.compare.page import page_of
from medialane.compare.reply import Reply, Served
from medialane.compare.report import make_report
from medialane.compare.summary import Slo
from medialane.compare.traffic import Traffic, TrafficRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REQUESTS = 60
#: Of headlines, WCAG 2.1 AA.
LEAST_LARGE = 3


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    """A report of two made-up servers whose answers part now and then."""

    def replies(factor, *, parts):
        return tuple(
            Reply(
                n,
                200,
                n * 0.2,
                2.0 * factor,
                ttft_s=0.1 * factor * (1 + n % 7),
                tpot_s=0.01 * factor,
                num_tokens=20,
                token_ids=(1, 2, 3 + (parts and n % 9 == 0)),
                text=f"a harbour {n % 9 if parts else 1}",
                served=Served(("hit", "miss"), ("loaded",), "features", "shm", 900, {"decode": 3.0, "prefill": 20.0}),
            )
            for n in range(NUM_REQUESTS)
        )

    sides = ("plain vLLM", "medialane")
    traffic = Traffic("recording", tuple(TrafficRequest(f"r{n}", 0.2 * n, dict) for n in range(NUM_REQUESTS)), "d")
    manifest = Manifest(
        model="org/a-model", requests="traffic.jsonl", digest="d", num_requests=NUM_REQUESTS, sides=sides,
        vllm_flags=("--max-model-len", "8192"), pace="at the times of the traffic", as_sent=False,
    )  # fmt: skip
    counters = {"prefix_queries": 100.0, "prefix_hits": 40.0}
    turns = [
        [Turn(TurnFacts(side, 1, is_whole=True, wall_s=12.0, cpu_s=9.0, counters=counters, num_parts=1), found)]
        for side, found in zip(sides, (replies(2, parts=False), replies(1, parts=True)), strict=True)
    ]
    report = make_report(manifest, traffic, turns, slo=Slo(), rounds=1, measured_on={"cpu": "a CPU"})
    path = tmp_path_factory.mktemp("compare") / "report.html"
    path.write_text(page_of(report, turns))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_report_is_readable_and_fits_any_window(tab, report_file, screenshots, scheme):
    await tab.prefer(scheme)
    await tab.goto(f"file://{report_file}")
    assert await tab.evaluate("document.querySelectorAll('svg').length") == 4
    await tab.evaluate("document.querySelector('details').open = true")
    found = await tab.evaluate(CONTRASTS)
    large = [await tab.text(f"h1 .{side}") for side in "ab"]
    assert len(found) > 100
    least = [(text, contrast, LEAST_LARGE if text in large else LEAST_CONTRAST) for text, contrast in found]
    assert not [each for each in least if each[1] < each[2]]
    for width in (1440, 420):
        await tab.resize(width, 900)
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        await tab.screenshot(screenshots / f"compare-{scheme}-{width}.png", whole=True)


async def test_button_changes_the_scheme(tab, report_file):
    await tab.goto(f"file://{report_file}")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = await tab.evaluate(colour)
    await tab.click("button")
    assert await tab.evaluate(colour) != light
    await tab.click("button")
    assert await tab.evaluate(f"{colour} === {json.dumps(light)}")
