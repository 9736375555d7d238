"""The site of the documentation, as `make docs` builds it: it is complete, and loads nothing from other hosts, neither
by its pages nor, in a browser, by its scripts.
"""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from aiohttp import web

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "docs-env" / "bin" / "python"
#: Elements by which a page loads something, and the attribute that says what.
_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_CSS_URL = re.compile(r"url\(\s*['\"]?(?!data:)([^'\")]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("NOT TESTED: the site of the documentation, whose builder `make docs` installs")
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run([PYTHON, ROOT / "docs/site/build.py", folder], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"a link, an anchor or a page of the navigation:\n{done.stdout}{done.stderr}"
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(site):
    """Where the site is served, with a policy by which a browser reports what a page loads from elsewhere."""

    async def add_policy(_request, response):
        response.headers["Content-Security-Policy"] = "default-src 'self' 'unsafe-inline' data: blob:"

    app = web.Application()
    app.router.add_static("/", site)
    app.on_response_prepare.append(add_policy)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Loaded(HTMLParser):
    """What a page loads by itself: not its links."""

    def __init__(self, page):
        super().__init__()
        self.urls = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if (url := attributes.get(_LOADS.get(tag))) and attributes.get("rel") not in {"canonical", "next", "prev"}:
            self.urls.append(url)


def test_pages_and_styles_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    loaded = {url for page in pages for url in Loaded(page).urls}
    loaded |= {url for style in site.rglob("*.css") for url in _CSS_URL.findall(style.read_text())}
    assert any(url.endswith(".js") for url in loaded)
    assert not {url for url in loaded if urlsplit(url).netloc}


def test_each_page_is_there_as_markdown_and_in_llms_txt(site):
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# medialane"
    assert lines[2].startswith("> ")
    entries = [re.fullmatch(r"- \[.+\]\((.+)\): .{10,}", line) for line in lines if line.startswith("- ")]
    listed = [entry[1] for entry in entries]
    assert sorted(listed) == sorted(str(page.relative_to(site)) for page in site.rglob("*.md"))
    assert all((ROOT / name).read_text() == (site / name).read_text() for name in listed)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", ["index.html", "docs/concepts/architecture.html", "docs/guides/from-dynamo.html"])
async def test_a_page_fits_a_phone_and_its_scripts_load_nothing_from_elsewhere(tab, url, screenshots, page):
    for width, scheme in ((390, "dark"), (1440, "light")):
        await tab.resize(width, 900)
        await tab.prefer(scheme)
        await tab.goto(f"{url}/{page}")
        await tab.until("document.querySelector('article h1').innerText")
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await tab.screenshot(screenshots / f"site-{Path(page).stem}-{width}.png")


@pytest.mark.asyncio(loop_scope="module")
async def test_search_finds_a_setting(tab, url):
    dialog = "[...document.querySelectorAll('*')].find((each) => each.shadowRoot)"
    await tab.goto(f"{url}/index.html")
    await tab.click(".md-search__button")
    await tab.until(f"{dialog}.shadowRoot.activeElement")
    await tab.type("arena-encoded-share")
    await tab.until(f"{dialog}.shadowRoot.textContent.includes('--arena-encoded-share')")
