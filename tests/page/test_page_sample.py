"""The page in a browser, over made-up states: everything that does not depend on where they come from."""

import json
import re
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from contrast import CONTRASTS, LEAST_CONTRAST
from sample_gateway import SampleGateway, SampleServer, Scene

from medialane.gateway.operators import ServerState

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY = "!document.querySelector('#content').hidden && document.querySelectorAll('#request-rows .row').length > 1"
EMPTY = "!document.querySelector('#content').hidden"
ROWS = "[...document.querySelectorAll('#request-rows .row:not(.head)')]"
SCENES = {
    "busy": Scene(slow_origin=True),
    "empty": Scene(workers=0, rate=0),
    "failing": Scene(workers=5, stalled=1, failing=0.2),
    "long-names": Scene(workers=12, long_names=True),
}
#: What stands out: level and text of each.
LINES = "[...document.querySelectorAll('#findings li')].map((line) => `${line.className} ${line.innerText}`)"
#: Elements of a page, whatever it shows.
MOST_ELEMENTS = 2500
#: Of the page's script, on a core that it shares with the sample gateway.
LONGEST_TASK_MS = 300
#: More than two drawings.
SLEEP = "new Promise((passed) => setTimeout(passed, 2500))"
LONG_TASKS = """var longest = 0; new PerformanceObserver((list) => list.getEntries().forEach(
    (each) => { longest = Math.max(longest, each.duration); })).observe({type: 'longtask'})"""


@asynccontextmanager
async def shown(tab, scene, ready=READY):
    """The page of a made-up gateway, which the browser leaves before the gateway ends."""
    async with SampleServer(scene).served() as server:
        await tab.goto(server.url)
        await tab.until(ready)
        yield server
        await tab.goto("about:blank")


async def test_one_page_shows_all_models(tab, screenshots):
    models = {
        "vision": Scene(workers=3, stalled=1),
        "org/text": Scene(workers=2, tenants=("w", "x", "y", "z")),
        "new": None,
    }
    async with SampleServer(Scene(), models).served() as server:
        await tab.goto(server.url)
        await tab.until(READY)
        buttons = "[...document.querySelectorAll('#models button')]"
        texts = await tab.evaluate(f"{buttons}.map((each) => each.innerText.replace(/\\s+/g, ' '))")
        assert [text.split()[0] for text in texts] == ["vision", "org/text", "new"]
        assert "2 of 3 workers" in texts[0]
        assert "2 of 2 workers" in texts[1]
        assert "does not answer" in texts[2]
        await tab.screenshot(screenshots / "models.png")
        assert await tab.evaluate(f"{buttons}.map((each) => each.getAttribute('aria-pressed'))") == [
            "true",
            "false",
            "false",
        ]
        await tab.evaluate(f"{buttons}[1].click()")
        await tab.until(f"{READY} && document.querySelectorAll('#worker-rows .row:not(.head)').length === 2")
        await tab.evaluate(f"{buttons}[2].click()")
        await tab.until("document.querySelector('#first-text').textContent.startsWith('new is starting')")
        await tab.evaluate(f"{buttons}[0].click()")
        await tab.until(f"{READY} && document.querySelectorAll('#worker-rows .row:not(.head)').length === 3")
        await tab.goto("about:blank")


async def test_what_is_made_up_has_the_form_of_a_state():
    made_up = json.loads(json.dumps(SampleGateway(SCENES["failing"]).state(time.time())))
    assert fields(made_up) == fields(msgspec.to_builtins(msgspec.convert(made_up, ServerState)))


def fields(value, at=""):
    """The paths of all members."""
    if isinstance(value, dict):
        return {f"{at}.{name}" for name in value} | {
            path for name in value for path in fields(value[name], f"{at}.{name}")
        }
    return {path for each in value[:1] for path in fields(each, at)} if isinstance(value, list | tuple) else set()


@pytest.mark.parametrize("name", SCENES)
async def test_nothing_is_wider_than_the_window(tab, screenshots, name):
    async with shown(tab, SCENES[name], READY if SCENES[name].rate else EMPTY):
        for width in (1440, 1000, 400):
            await tab.resize(width, 900)
            assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            for scheme in ("light", "dark"):
                await tab.prefer(scheme)
                await tab.until(f"document.documentElement.dataset.theme === '{scheme}'")
                await tab.screenshot(screenshots / f"{name}-{scheme}-{width}.png", whole=True)


async def test_a_thousand_workers_and_500_requests_a_second_are_bounded(tab, screenshots):
    async with shown(tab, Scene(workers=1000, rate=500, stalled=3)):
        await tab.evaluate(LONG_TASKS)
        await tab.until("/^[4-9][0-9][0-9] in flight/.test(document.querySelector('#requests-note').innerText)")
        await tab.evaluate(SLEEP)
        assert await tab.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
        assert await tab.evaluate("document.querySelectorAll('#worker-rows .row').length") < 10
        assert "1,000 workers" in await tab.text("#serving")
        assert "stalled" in await tab.text("#findings")
        assert await tab.evaluate("longest") < LONGEST_TASK_MS
        await tab.screenshot(screenshots / "thousand-workers.png", whole=True)


async def test_a_stalled_worker_a_slow_origin_and_failures_stand_out(tab):
    scene = Scene(workers=5, stalled=1, slow_origin=True, failing=0.2)
    async with shown(tab, scene):
        lines = (await tab.text("#findings")).splitlines()
        assert re.match(r"worker-0 is stalled, for \d+\.\d s: \d+ requests wait there", lines[0])
        slow = r"slow.example.com answers slowly: to fetch an item takes 3\.\d s"
        assert any(re.match(slow, line) for line in lines)
        assert any("of requests failed in the last minute" in line for line in lines)
        assert await tab.text("#workers-note") == "1 stalled, 4 ready"
        await tab.click("#findings button")
        await tab.until(f"{ROWS}.length && {ROWS}.every((row) => row.view.worker === 'worker-0')")
        assert "worker silent" in await tab.text("#request-rows")


async def test_a_worker_is_only_said_not_to_respond_while_nothing_of_it_goes_on(tab):
    worker = {"state": "ready", "oldest_ms": 4000, "first_token_p50_ms": 200, "silent_ms": 3000}
    async with shown(tab, Scene()):
        for changes, is_stuck in [
            ({}, True),
            ({"silent_ms": 0}, False),  # slow, but its tokens come
            ({"oldest_ms": 500}, False),
            ({"first_token_p50_ms": 2000}, False),  # that is what it takes
            ({"state": "stalled", "oldest_ms": None}, True),
        ]:
            call = f"import('./findings.js').then((module) => module.isStuck({json.dumps(worker | changes)}, []))"
            assert await tab.evaluate(call) is is_stuck


@pytest.mark.parametrize(
    ("num_pauses", "text"),
    [
        (1, "did not respond for 5.0 s, 9 s ago"),
        (3, "stops for 5.0 s at a time: 3 times so far, last 9 s ago"),
    ],
)
async def test_a_worker_that_stops_again_and_again_is_the_worst_though_it_is_ready_now(tab, num_pauses, text):
    state = SampleGateway(Scene()).state(1000.0)
    state["workers"]["listed"].sort(key=lambda worker: worker["name"])
    pauses = [["worker-2", [{"at": 991 - 20 * number, "seconds": 5} for number in reversed(range(num_pauses))]]]
    async with shown(tab, Scene()):
        said = await tab.evaluate(f"""import('./findings.js').then((module) => {{
            const state = {json.dumps(state)};
            module.watchPauses(state, new Map({json.dumps(pauses)}));
            const found = module.findings(state).find((each) => each.subject === 'worker-2');
            return [found.level, found.text, ...module.worstFirst(state.workers.listed).map((each) => each.name)];
        }})""")
    assert said == ["amber", text, "worker-2", "worker-0", "worker-1", "worker-3"]


async def test_new_media_are_an_observation_unless_others_wait_for_them(tab):
    for failing, level in [(0.0, "grey"), (0.1, "amber")]:  # with failures, preparers are busy
        async with shown(tab, Scene(failing=failing)):
            (line,) = [text for text in await tab.evaluate(LINES) if text.startswith(f"{level} clips")]
            assert re.search(r"new media: .* items were not cached, \d+ % of the time of all preparations", line)


async def test_a_quiet_server_says_that_nothing_stands_out(tab):
    async with shown(tab, Scene(rate=0), EMPTY):
        assert "Nothing stands out" in await tab.text("#findings")
        assert "No requests yet" in await tab.text("#requests-empty")


async def test_keys(tab):
    async with shown(tab, Scene()):
        await tab.press("/")
        await tab.type("clips")
        await tab.until(f"{ROWS}.length && {ROWS}.every((row) => row.view.tenant === 'clips')")
        await tab.press("Escape")
        await tab.until(f"{ROWS}.some((row) => row.view.tenant === 'search')")
        await tab.press("ArrowDown")
        first = await tab.text("#detail-title")
        await tab.press("ArrowDown")
        assert await tab.text("#detail-title") != first
        await tab.press("ArrowUp")
        await tab.press("Escape")
        assert await tab.evaluate("document.querySelector('#detail').hidden")
        await tab.press("?")
        assert await tab.evaluate("document.querySelector('#help').open")
        await tab.press("Escape")
        await tab.press("p")
        assert await tab.text("#link") == "paused"
        before = await tab.text("#request-rows")
        await tab.evaluate(SLEEP)
        assert await tab.text("#request-rows") == before
        await tab.press("p")
        await tab.until("document.querySelector('#link').innerText === 'live'")


async def test_filters_narrow_the_list_and_can_find_nothing(tab):
    async with shown(tab, Scene(workers=5, failing=0.2, slow_origin=True)):
        for name, of_row in {
            "failed": "row.view.error",
            "slow": "(row.view.ttft_ms ?? row.view.total_ms) >= 1000",
        }.items():
            await tab.click(f"#filters [name={name}]")
            await tab.until(f"{ROWS}.length && {ROWS}.every((row) => {of_row})")
            await tab.click(f"#filters [name={name}]")
        await tab.evaluate("""(() => { const select = document.querySelector('#filters [name=modality]');
            select.value = 'video'; select.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        await tab.until(f"{ROWS}.length && {ROWS}.every((row) => row.view.items[0].modality === 'video')")
        await tab.press("/")
        await tab.type("nobody has this name")
        await tab.until("!document.querySelector('#requests-empty').hidden")
        assert "No request passes the filter" in await tab.text("#requests-empty")


async def test_the_key_is_asked_for_and_forgotten_with_the_page(tab, screenshots):
    async with shown(tab, Scene(key="right"), "document.activeElement.id === 'key'"):
        await tab.screenshot(screenshots / "login.png")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('#login-error').innerText.startsWith('This is not')")
        await tab.type("right")
        await tab.press("Enter")
        await tab.until(READY)
        await tab.evaluate("location.reload()")
        await tab.until("document.activeElement.id === 'key'")
    assert all("401" in error for error in tab.errors)
    tab.errors.clear()


async def test_a_gateway_that_is_gone_is_reported_and_found_again(tab, screenshots):
    async with SampleServer(Scene()).served() as server:
        await tab.goto(server.url)
        await tab.until(READY)
        port = int(server.url.split(":")[2].split("/")[0])
    await tab.until("document.querySelector('#link').innerText.includes('does not answer')", 10)
    await tab.screenshot(screenshots / "gone.png")
    async with SampleServer(Scene()).served(port):
        await tab.until("document.querySelector('#link').innerText === 'live'", 10)
        await tab.goto("about:blank")
    assert all("net::ERR" in error for error in tab.errors)
    tab.errors.clear()


async def test_names_are_text(tab):
    scene = Scene(tenants=("<img src=x onerror=console.error(1)>", "<b>bold</b>", "'\"&amp;", "clips"))
    async with shown(tab, scene):
        await tab.click("#request-rows .row:not(.head)")
        await tab.until("document.querySelector('#detail-body').children.length > 1")
        assert "<img src=x onerror=console.error(1)>" in await tab.text("#tenants-rows")
        assert not await tab.evaluate("document.querySelectorAll('img, b b').length")


async def test_texts_have_contrast(tab):
    async with shown(tab, Scene(stalled=1, failing=0.2)):
        for scheme in ("light", "dark"):
            await tab.prefer(scheme)
            await tab.until(f"document.documentElement.dataset.theme === '{scheme}'")
            found = await tab.evaluate(CONTRASTS)
            assert len(found) > 50
            assert not [(text, contrast) for text, contrast in found if contrast < LEAST_CONTRAST]
