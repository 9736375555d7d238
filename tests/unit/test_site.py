"""The site of the documentation, as `make docs` builds it: it is complete, and loads nothing from other hosts."""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

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
