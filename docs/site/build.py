"""Builds the site of the documentation: `make docs`, or python docs/site/build.py [FOLDER], by default site/

The pages are those of the repository, in the same folders, so that a link leads to the same file in both; what a page
links to comes along. Each page is there as Markdown, too (`docs/api.html`, `docs/api.md`), and `llms.txt` lists them
(llmstxt.org). Exits with 1 if a link or an anchor leads nowhere, or if a page is not in the navigation of mkdocs.yml.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("mkdocs.yml")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)[^)\s]*\)")
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|[*`]")


class _Loader(yaml.SafeLoader):
    """Leaves out functions, which the configuration names for the builder."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def configuration() -> dict[str, Any]:
    return yaml.load(CONFIG.read_text(), _Loader)  # noqa: S506 - a safe loader


def sections() -> dict[str, list[str]]:
    """The navigation: titles of sections, and the pages of each."""
    nav = [section for each in configuration()["nav"] for section in each.items()]
    return {title: [pages] if isinstance(pages, str) else pages for title, pages in nav}


def _linked(page: Path) -> set[Path]:
    paths = {Path(os.path.normpath(page.parent / link)) for link in _LINK.findall(_FENCE.sub("", page.read_text()))}
    return {path for path in paths if path.is_file()}


def files() -> set[Path]:
    """All pages, and what they link to."""
    found = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    waiting = list(found)
    while waiting:
        page = waiting.pop()
        new = _linked(page) - found if page.suffix == ".md" else set()
        found |= new
        waiting += new
    return found


def copy(paths: Iterable[Path], target: Path) -> None:
    """Copy files of the repository into a folder, where they have the same relative paths."""
    for path in paths:
        copied = target / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)


def check_navigation(pages: set[Path]) -> None:
    """Exit if a page is in no section."""
    listed = {page for pages in sections().values() for page in pages}
    written = {str(path.relative_to(ROOT)) for path in pages if path.suffix == ".md"}
    if unlisted := written - listed:
        sys.exit(f"mkdocs.yml: nav needs a place for {', '.join(sorted(unlisted))}")


def _line(page: str) -> str:
    """A page in llms.txt: its title, and its first sentence, or what it is about."""
    title, _, text = _FENCE.sub("", (ROOT / page).read_text()).removeprefix("# ").partition("\n")
    paragraph = " ".join(text.strip().partition("\n\n")[0].split()).removeprefix("**What you get:** ")
    if paragraph.startswith("## "):
        paragraph = ", ".join(re.findall(r"^## (.+)$", text, re.MULTILINE))
    sentence = re.split(r"(?<=[.;]) ", _MARKUP.sub(r"\1", paragraph))[0]
    return f"- [{title}]({page}): {sentence.strip(' :;')}\n"


def llms_txt() -> str:
    config = configuration()
    parts = [f"\n## {title}\n\n{''.join(map(_line, pages))}" for title, pages in sections().items()]
    return f"# {config['site_name']}\n\n> {config['site_description']}\n{''.join(parts)}"


def build(folder: Path) -> Path:
    """Build the site in an empty folder, and return where it is."""
    pages = files()
    check_navigation(pages)
    copy([CONFIG], folder)
    config = folder / CONFIG.relative_to(ROOT)
    copy(pages, config.parent / "pages")
    shutil.copy(CONFIG.with_name("style.css"), config.parent / "pages")
    program = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--config-file", config]
    if subprocess.run(program, timeout=120).returncode:  # noqa: S603 - constant
        sys.exit("the site was not built: see above")
    site = config.parent / "site"
    copy((path for path in pages if path.suffix == ".md"), site)
    (site / "llms.txt").write_text(llms_txt())
    return site


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(built, target)
