import io
import time

import pytest
from rich.console import Console

from medialane.cli.progress import Progress
from medialane.runtime.phase import Phase, PhaseFile


def make(*, terminal, verbose=False, **settings):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False, color_system=None)
    return Progress(["worker 0", "gateway"], verbose=verbose, console=console, **settings), stream


def test_plain_output_has_a_line_for_each_phase():
    progress, stream = make(terminal=False)
    progress.starting("worker 0")
    progress.entered("worker 0", Phase("importing vLLM"))
    progress.entered("worker 0", Phase("loading the weights", 0, 3))
    progress.entered("worker 0", Phase("loading the weights", 1, 3))
    progress.tick()
    progress.ready("worker 0", 38.4)
    progress.ended("worker 0", "killed by SIGKILL", 0.0)
    progress.ended("worker 0", "killed by SIGKILL", 2.0)
    assert stream.getvalue().splitlines() == [
        "worker 0: starting",
        "worker 0: importing vLLM",
        "worker 0: loading the weights 0/3",
        "worker 0: ready after 38 s",
        "worker 0: exited (killed by SIGKILL); restarting now",
        "worker 0: exited (killed by SIGKILL); restarting in 2 s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_line_of_a_log_is_never_shown_as_progress(terminal):
    progress, stream = make(terminal=terminal)
    progress.starting("worker 0")
    progress.printed("worker 0", ["WARNING Triton is installed, but", 'INFO: "GET /health HTTP/1.1" 503'])
    progress.tick()
    progress.finish()
    assert "Triton" not in stream.getvalue()
    assert "/health" not in stream.getvalue()


def test_terminal_shows_the_phase_and_a_spinner_of_each_process():
    progress, stream = make(terminal=True)
    progress.starting("worker 0")
    progress.entered("worker 0", Phase("loading [the] weights", 1, 2))
    progress.tick()
    worker, gateway = stream.getvalue().splitlines()[-2:]
    assert "loading [the] weights 1/2" in worker
    assert "0 s" in worker
    assert any(frame in worker for frame in "-\\|/")
    assert "waiting for its turn" in gateway
    progress.ready("worker 0", 12)
    progress.finish()
    progress.finish()
    assert "12 s" in stream.getvalue()
    progress.ended("worker 0", "exit status 1", 1.0)
    assert "restarting in 1 s" in stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_remedy_is_shown_once_when_a_phase_takes_long(terminal):
    progress, stream = make(terminal=terminal, long_s=1.0)
    progress.starting("worker 0")
    progress.entered("worker 0", Phase("profiling the largest video", remedy="lower --max-model-len"))
    progress.tick()
    assert "--max-model-len" not in stream.getvalue()
    time.sleep(1.0)  # time: of a long phase
    progress.tick()
    progress.tick()
    assert stream.getvalue().count("worker 0: profiling the largest video takes long: lower --max-model-len") == 1


def test_remedy_is_not_shown_for_a_process_that_is_ready():
    progress, stream = make(terminal=False, long_s=0.0)
    progress.starting("worker 0")
    progress.entered("worker 0", Phase("profiling", remedy="lower --max-model-len"))
    progress.ready("worker 0", 3)
    progress.tick()
    assert "--max-model-len" not in stream.getvalue()


def test_phases_are_passed_on_to_the_process_that_runs_this_command(tmp_path, monkeypatch):
    file = PhaseFile(tmp_path / "serve.phase")
    for name, value in file.environ().items():
        monkeypatch.setenv(name, value)
    progress, _ = make(terminal=False)
    progress.entered("gateway", Phase("loading the model's processor"))
    assert file.read() == Phase("gateway: loading the model's processor")


def test_exit_that_is_followed_by_a_restart_is_a_failure_and_one_that_is_not_needed_is_none():
    progress, _ = make(terminal=False)
    progress.ended("gateway", "not needed: this model takes no media", None)
    assert not progress.has_failed
    progress.ended("worker 0", "killed by SIGKILL", 1.0)
    assert progress.has_failed


def test_verbose_output_prefixes_every_line_with_its_process():
    progress, stream = make(terminal=False, verbose=True)
    progress.printed("gateway", ["one [red]", "two"])
    assert stream.getvalue().splitlines() == ["[gateway] one [red]", "[gateway] two"]
