"""The page of a real gateway, with a store, preparers and simulated workers, each a process as a user starts it."""

import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from page_situation import Load, Origin, Site, log_in, served_site

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

ROWS = "[...document.querySelectorAll('#request-rows .row:not(.head)')]"
#: Of a gateway that imports vLLM, on a busy machine.
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


async def test_it_follows_requests_and_shows_each_in_full(site: Site, origin: Origin, page, screenshots):
    await log_in(page, site)
    assert "Nothing stands out" in await page.text("#findings")
    async with Load(site, origin, speed=2).running():
        await page.until(f"{ROWS}.some((row) => !row.view.stage) && {ROWS}.some((row) => row.view.stage)")
        before = await page.text("#request-rows")
        await page.until("document.querySelectorAll('#decision-rows .row').length > 1")
        await page.until("document.querySelector('.stage[data-cell=fetch] .count').innerText !== '0'")
        assert await page.text("#request-rows") != before
        await page.evaluate("""(() => { const select = document.querySelector('#filters [name=tenant]');
            select.value = 'clips'; select.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        await page.until(f"{ROWS}.length && {ROWS}.every((row) => row.view.tenant === 'clips')")
        await page.until(f"{ROWS}.some((row) => row.view.items[0].outcome === 'new' && row.view.ttft_ms)")
        await page.evaluate(f"{ROWS}.find((row) => row.view.items[0].outcome === 'new' && row.view.ttft_ms).click()")
        await page.until("document.querySelector('#detail .choice')")
        detail = await page.text("#detail")
        assert all(
            word in detail for word in ("clips", "video", "frames", "new, prepared", "Decode", "Prefill", "worker-")
        )
        assert "http" not in detail
        await page.press("Escape")
        await page.press("Escape")
        await page.until("document.querySelector('#findings').innerText.includes('127.0.0.9')", 30)
        await page.until("document.querySelector('#tenants-rows').innerText.includes('catalogue')")
        await page.screenshot(screenshots / "gateway.png", whole=True)


async def test_it_survives_a_restart_of_the_gateway(site: Site, page):
    await log_in(page, site)
    site.gateway.restart()
    await page.until("document.querySelector('#link').innerText.includes('does not answer')")
    await page.until("document.querySelector('#link').innerText === 'live'", RESTART_S)
    await page.until("document.querySelectorAll('#worker-rows .row').length === 3")
    assert all("net::ERR" in error or "503" in error for error in page.errors), page.errors
    page.errors.clear()


async def test_nobody_sees_anything_without_the_key(site: Site, page):
    await page.goto(site.page_url)
    await page.until("document.activeElement.id === 'key'")
    await page.type("key-of-clips")
    await page.press("Enter")
    await page.until("document.querySelector('#login-error').innerText.startsWith('This is not')")
    assert not await page.evaluate("document.querySelector('#content').checkVisibility()")
    assert all("401" in error for error in page.errors)
    page.errors.clear()
