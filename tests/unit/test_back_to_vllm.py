"""docs/guides/back-to-vllm.md: all names exist on both sides, and none of `medialane serve --help` is missing."""

import argparse
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from medialane.cli import serve
from medialane.cluster import flag_table
from medialane.config import settings

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "back-to-vllm.md").read_text()
ROWS = re.findall(r"^\| (`--.+?) \| (.+) \|$", PAGE, re.MULTILINE)
COMMANDS = [shlex.split(line) for line in re.findall(r"^(?:medialane|vllm) serve .*$", PAGE, re.MULTILINE)]
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")


def vllm_flags():
    return flag_table()["flags"].keys()


def our_flags():
    return {setting.flag for setting in settings()} | {"--config"}


def flags_of(words):
    return {word for word in words if _FLAG.fullmatch(word)}


def test_flags_of_both_sides_exist():
    ours = {flag for row, _ in ROWS for flag in _FLAG.findall(row)}
    theirs = {flag for _, row in ROWS for flag in _FLAG.findall(row)}
    assert len(ROWS) > 20
    assert ours <= our_flags()
    assert theirs <= vllm_flags()


def test_variables_of_vllm_exist():
    folder = find_spec("vllm")
    if folder is None:
        pytest.skip("vLLM is not installed")
    known = (Path(folder.origin).parent / "envs.py").read_text()
    named = set(re.findall(r"\bVLLM_[A-Z_]+\b", PAGE))
    assert {name for name in named if f'"{name}"' not in known} == set()


def test_every_common_flag_of_serve_has_a_row():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    parser.epilog = None
    shown = {each.replace("--no-", "--") for each in re.findall(r"^  .*?(--[a-z0-9-]+)", parser.format_help(), re.M)}
    named = {flag for row, _ in ROWS for flag in _FLAG.findall(row)}
    assert shown & our_flags() - named == set()
    assert "--workers" in shown


def test_commands_are_valid_and_give_vllm_the_same_flags():
    pairs = list(zip(COMMANDS[::2], COMMANDS[1::2], strict=True))
    assert len(pairs) == 2
    for ours, theirs in pairs:
        assert (ours[:2], theirs[:2]) == (["medialane", "serve"], ["vllm", "serve"])
        assert ours[2] == theirs[2], "the model"
        own, passed_on = ours[3 : ours.index("--")], ours[ours.index("--") + 1 :]
        assert flags_of(own) <= our_flags()
        assert flags_of(theirs) <= vllm_flags()
        assert theirs[-len(passed_on) :] == passed_on
