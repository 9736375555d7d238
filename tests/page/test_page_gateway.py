"""The page of a real gateway, with a store, preparers and simulated workers, each a process as a user starts it."""

import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from page_situation import Load, Origin, Site, log_in, served_site

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

ROWS = "[...document.querySelectorAll('#request-rows .row:not(.head)')]"
#: Of a gateway that imports vLLM, on a busy machine.
#: Until a gateway that has just started has prepared its first media.
FIRST_S = 60
RESTART_S = 120


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site():
    with tempfile.TemporaryDirectory(prefix="ml-page-", dir="/tmp") as folder:
        async with served_site(Path(folder), num_workers=2) as site:
            yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def origin():
    async with Origin(slow_s=1.5).served() as origin:
        yield origin


async def test_it_follows_requests_and_shows_each_in_full(site: Site, origin: Origin, tab, screenshots):
    await log_in(tab, site)
    assert "Nothing stands out" in await tab.text("#findings")
    async with Load(site, origin, speed=2).running():
        await tab.until(f"{ROWS}.some((row) => !row.view.stage) && {ROWS}.some((row) => row.view.stage)", FIRST_S)
        await tab.evaluate("text = document.querySelector('#request-rows').innerText, null")
        await tab.until("document.querySelector('#request-rows').innerText !== text")
        await tab.until("document.querySelectorAll('#decision-rows .row').length > 1")
        await tab.until("document.querySelector('.step[data-cell=fetch] .count').innerText !== '0'")
        await tab.evaluate("""(() => { const select = document.querySelector('#filters [name=tenant]');
            select.value = 'clips'; select.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        await tab.until(f"{ROWS}.length && {ROWS}.every((row) => row.view.tenant === 'clips')")
        await tab.until(f"{ROWS}.some((row) => row.view.items[0].outcome === 'new' && row.view.ttft_ms)")
        await tab.evaluate(f"{ROWS}.find((row) => row.view.items[0].outcome === 'new' && row.view.ttft_ms).click()")
        await tab.until("document.querySelector('#detail .choice')")
        detail = await tab.text("#detail")
        assert all(
            word in detail for word in ("clips", "video", "frames", "new, prepared", "Decode", "Prefill", "worker-")
        )
        assert "http" not in detail
        await tab.press("Escape")
        await tab.press("Escape")
        await tab.until("document.querySelector('#findings').innerText.includes('127.0.0.9')", 30)
        await tab.until("document.querySelector('#tenants-rows').innerText.includes('catalogue')")
        await tab.screenshot(screenshots / "gateway.png", whole=True)


async def test_it_survives_a_restart_of_the_gateway(site: Site, tab):
    await log_in(tab, site)
    site.gateway.restart()
    await tab.until("document.querySelector('#link').innerText.includes('does not answer')")
    await tab.until("document.querySelector('#link').innerText === 'live'", RESTART_S)
    await tab.until("document.querySelectorAll('#worker-rows .row').length === 3")
    assert all("net::ERR" in error or "503" in error for error in tab.errors), tab.errors
    tab.errors.clear()


async def test_nobody_sees_anything_without_the_key(site: Site, tab):
    await tab.goto(site.page_url)
    await tab.until("document.activeElement.id === 'key'")
    await tab.type("key-of-clips")
    await tab.press("Enter")
    await tab.until("document.querySelector('#login-error').innerText.startsWith('This is not')")
    assert not await tab.evaluate("document.querySelector('#content').checkVisibility()")
    assert all("401" in error or "403" in error for error in tab.errors)
    tab.errors.clear()
