"""A tab of a headless Chromium, and a folder for screenshots of what it shows.

The browser and the prepared situation are the benchmarks'.
"""

import shutil
import sys
from pathlib import Path

import pytest
import pytest_asyncio

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from chromium import PROGRAM, chromium_tab  # noqa: E402 - found by the line above

#: Kept after the tests, for people to look at.
SCREENSHOTS = ROOT / ".screenshots"
BROWSER_S = 60


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BROWSER_S))
        if "browser" in item.fixturenames and shutil.which(PROGRAM) is None:
            item.add_marker(pytest.mark.skip(reason="Chromium is not installed: apt-get install chromium"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with chromium_tab() as tab:
        yield tab


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser):
    """A window without a session, in the light. It must have no errors at the end but those that the test removes."""
    await browser.send("Network.clearBrowserCookies")
    await browser.resize(1440, 900)
    await browser.prefer("light")
    yield browser
    await browser.goto("about:blank")
    errors, browser.errors = browser.errors, []
    assert not errors


@pytest.fixture
def screenshots() -> Path:
    return SCREENSHOTS
