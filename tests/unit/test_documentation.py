"""README and docs: links resolve, named settings and error codes exist, generated figures are current."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import models_page
import pytest

import setting_reference
from medialane.cli import COMMANDS
from medialane.cluster import flag_table
from medialane.config import settings
from medialane.store import messages
from medialane.transfer.peer_connection import PEER_VERSION
from medialane.types.errors import (
    AlreadyJoined,
    AuthenticationFailed,
    ClientDisconnected,
    HandoverFailed,
    MedialaneError,
    ProtocolViolation,
    StartupFailed,
    WorkerDraining,
    WorkerStalled,
)
from medialane.wire import protocol

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "medialane"
TOP_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = sorted([*TOP_PAGES, *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: The settings of a section begin with its name; flags without such a prefix may be vLLM's.
_OWN_FLAG = re.compile(
    r"--((?:gateway|store|media|prepare|arena|transfer|routing|rpc|simulated)-[a-z0-9-]*[a-z0-9])(?![\w.-])"
)


def _classes(cls: type[MedialaneError]) -> list[type[MedialaneError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _classes(child))]


def _anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_resolve(page):
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_a_page_exist(page):
    known = {setting.name for setting in settings()} | {"media-io-kwargs"}  # the latter is vLLM's
    assert set(_OWN_FLAG.findall(page.read_text().partition("## What has left")[0])) <= known


def _flags() -> set[str]:
    """The flags of our commands, and vLLM's."""
    found = set(flag_table()["flags"]) | {f"--{setting.name}" for setting in settings()}
    for command in COMMANDS.values():
        parser = argparse.ArgumentParser()
        import_module(f"medialane.cli.{command.module}").add_arguments(parser)
        found |= _flags_of(parser)
    return found


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Its flags, and its commands' flags."""
    found = set()
    for action in parser._actions:  # noqa: SLF001 - argparse's only list
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - has no public name
            found |= {flag for command in action.choices.values() for flag in _flags_of(command)}
    return found


@pytest.mark.parametrize(
    "page", [ROOT / "docs/faq.md", *(ROOT / "docs/guides").glob("*.md")], ids=lambda page: page.name
)
def test_flags_named_in_a_guide_exist(page):
    """Without flags of other programs, in the first column of a comparison, and of vLLM's own benchmark."""
    theirs, ours = "", re.sub(r"^vllm bench (?:.*\\\n)*.*$", "", page.read_text(), flags=re.MULTILINE)
    if page.name.startswith(("from-", "llm-d", "upgrading")):
        theirs = "\n".join(re.findall(r"^\|(.*?)\|", ours, re.MULTILINE))
        ours = re.sub(r"^\|.*?\|", "|", ours, flags=re.MULTILINE)
    ours = re.sub(r"vllm bench (?:\\\n|[^\n`])*", "", ours)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![a-z0-9-])", ours))
    assert named - _flags() <= {"--ipc", "--shm-size", "--version"} | set(re.findall(r"--[a-z-]+", theirs))


#: Between processes, and of commands.
_INTERNAL = (
    HandoverFailed,
    ProtocolViolation,
    AuthenticationFailed,
    StartupFailed,
    AlreadyJoined,
    WorkerStalled,
    WorkerDraining,
    ClientDisconnected,
)


def test_api_page_lists_every_code_with_its_status():
    page = (ROOT / "docs/api.md").read_text().partition("The strings:")[2].partition("What the host")[0]
    rows = re.findall(r"^\| ([45]\d\d).*? \| (.+) \|$", page, re.MULTILINE)
    listed = [(code, int(status)) for status, codes in rows for code in re.findall(r"`([a-z0-9_]+)`", codes)]
    sent = {(cls.code, cls.status) for cls in _classes(MedialaneError) if not issubclass(cls, _INTERNAL)}
    assert sorted(listed) == sorted(sent)


def test_api_page_names_every_endpoint_of_ours():
    """The routes of vLLM's app: tests/contract/test_access.py."""
    nodes = [node for path in SOURCES.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = (re.fullmatch(r"(?:[A-Z]+ )?(/medialane/(?:[\w/{}]*[\w}])?)", text) for text in texts)
    paths = {match[1] for match in found if match}
    rows = re.findall(r"^\| (`/.+?) \| medialane \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    listed = {path for row in rows for path in re.findall(r"`(/[^`]*)`", row)}
    assert "/medialane/state" in paths
    drain = "/medialane/workers/{name}/drain"  # names of workers have slashes
    assert listed == paths | {drain, "/ready", "/live"}


def test_stability_page_has_the_numbers_of_the_protocols():
    text = (ROOT / "docs/reference/stability.md").read_text()
    rows = dict(
        re.findall(r"^\| (gateway and worker|store and .*?) \| (\d+) \|", text.replace(", whoever connects", ""), re.M)
    )
    numbers = [protocol.PROTOCOL_VERSION, messages.PROTOCOL_VERSION, PEER_VERSION]
    assert list(map(int, rows.values())) == numbers, "of workers, the store's clients, other hosts' stores"


def test_page_of_settings_is_current():
    write_again = "run `python tests/setting_reference.py`"
    assert setting_reference.PAGE.read_text() == setting_reference.page(), write_again


def test_error_codes_in_the_troubleshooting_page_exist():
    rows = re.findall(r"^\* \*\*[45]\d\d (.+?)\*\*", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`([a-z]+_[a-z_]+)`", row)}
    codes = {cls.code for cls in _classes(MedialaneError)}
    assert "arena_full" in named
    assert named - {"mm_processor_kwargs", "media_io_kwargs"} <= codes


def test_configuration_page_lists_every_benchmark():
    row = re.search(r"^\| `medialane bench NAME` .*$", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    assert row is not None
    names = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert names <= set(re.findall(r"`(\w+)`", row[0]))


def test_glossary_has_each_term_once():
    terms = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs/concepts/glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(terms) > 15
    assert len(set(terms)) == len(terms)


def test_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_generated_figures_are_current():
    check = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "--check"]
    assert subprocess.run(check, timeout=20).returncode == 0, "run `python benchmarks/figures.py`"


def test_table_of_models_is_current():
    write_again = "run `python tests/families/models_page.py`"
    assert models_page.PAGE.read_text() == models_page.page(models_page.load()), write_again


def test_no_family_in_the_table_of_models_differs_from_plain_vllm():
    rows = models_page.load()
    assert not [name for name, row in rows.items() if row.differs or row.verdicts.get("differs")]


def test_way_of_a_request_names_files_that_exist_and_counts_them():
    page = (ROOT / "docs/rooms/gateway.md").read_text()
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", page.split("## A request, file by file")[1], re.MULTILINE)[2:]
    text, image = (set().union(*(_files(row[column]) for row in rows)) for column in (0, 1))
    assert f"These are {len(text)} files, and {len(image - text)} for the image." in page


def _files(cell: str) -> set[Path]:
    """The files of a cell of `folder/`: `file`, `file`; `folder/file`."""
    found = set()
    for group in cell.split(";"):
        folder, colon, names = group.rpartition(":")
        prefix = folder.strip(" `") if colon else ""
        for name in re.findall(r"`([^`]+)`", re.sub(r"\]\([^)]*\)", "", names)):
            candidates = [room / prefix / f"{name}.py" for room in (SOURCES, SOURCES / "gateway")]
            files = [path for path in candidates if path.is_file()]
            assert len(files) == 1, f"{prefix}{name}"
            found.update(files)
    return found
