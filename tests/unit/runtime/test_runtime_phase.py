import asyncio
import logging
import os
import sys

import pytest

from medialane.runtime.phase import VARIABLE, Phase, PhaseFile, enter_phase, report_phase


@pytest.fixture
def file(tmp_path, monkeypatch):
    found = PhaseFile(tmp_path / "worker-0.phase")
    for name, value in found.environ().items():
        monkeypatch.setenv(name, value)
    return found


def test_latest_phase_counts_and_ends_with_its_file(file, tmp_path):
    assert file.read() is None
    enter_phase("importing vLLM")
    report_phase(Phase("loading the weights", 2, 5, "buy a faster disk"))
    assert file.read() == Phase("loading the weights", 2, 5, "buy a faster disk")
    assert str(file.read()) == "loading the weights 2/5"
    file.remove()
    file.remove()
    assert file.read() is None
    assert os.listdir(tmp_path) == []


async def test_descendants_report_to_the_same_file(file):
    code = "from medialane.runtime.phase import enter_phase; enter_phase('profiling')"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
    assert file.read() == Phase("profiling")


def test_without_a_reader_a_phase_is_logged(monkeypatch, caplog):
    monkeypatch.delenv(VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        enter_phase("joining gateways")
    assert caplog.messages == ["joining gateways"]


def test_phase_that_cannot_be_reported_ends_nothing(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "/nowhere/worker.phase")
    with caplog.at_level(logging.INFO):
        report_phase(Phase("warming up"))
    assert caplog.messages == ["the phase warming up cannot be reported: No such file or directory"]


def test_file_of_something_else_is_no_phase(file, tmp_path):
    (tmp_path / "worker-0.phase").write_text("2026-11-21 WARNING Triton is installed")
    assert file.read() is None
