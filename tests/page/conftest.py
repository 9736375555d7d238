"""A tab of a headless Chromium, and a folder for screenshots of what it shows.

The browser and the prepared situation are those of the benchmarks.
"""

import shutil
import sys
from contextlib import asynccontextmanager
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
        if shutil.which(PROGRAM) is None:
            item.add_marker(pytest.mark.skip(reason="Chromium is not installed: apt-get install chromium"))


@asynccontextmanager
async def flawless_tab():
    """It must have no errors at the end but those that the test has removed."""
    async with chromium_tab() as tab:
        yield tab
        await tab.goto("about:blank")  # its connections end before the server does
        assert not tab.errors


@pytest.fixture
async def tab():
    async with flawless_tab() as tab:
        yield tab


@pytest_asyncio.fixture(loop_scope="module")
async def page():
    """A tab for tests that share a loop."""
    async with flawless_tab() as tab:
        yield tab


@pytest.fixture
def screenshots() -> Path:
    return SCREENSHOTS
