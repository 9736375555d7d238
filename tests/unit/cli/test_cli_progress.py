import io

import pytest
from rich.console import Console

from medialane.cli.progress import Progress, brief


def make(*, terminal, verbose=False):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False, color_system=None)
    return Progress(["worker 0", "gateway"], verbose=verbose, console=console), stream


def test_plain_output_has_each_event_once():
    progress, stream = make(terminal=False)
    progress.starting("worker 0")
    progress.printed("worker 0", ["loading [weights]"])
    progress.tick()
    progress.ready("worker 0", 38.4)
    progress.ended("worker 0", "killed by SIGKILL", 0.0)
    progress.ended("worker 0", "killed by SIGKILL", 2.0)
    assert stream.getvalue().splitlines() == [
        "worker 0: starting",
        "worker 0: ready after 38 s",
        "worker 0: exited (killed by SIGKILL); restarting now",
        "worker 0: exited (killed by SIGKILL); restarting in 2 s",
    ]


def test_terminal_shows_the_current_status_of_a_process():
    progress, stream = make(terminal=True)
    progress.starting("worker 0")
    progress.printed("worker 0", ["", "Loading weights [1/2]"])
    progress.tick()
    assert "Loading weights [1/2]" in stream.getvalue()
    progress.finish()
    progress.finish()
    progress.ended("worker 0", "exit status 1", 1.0)
    assert "restarting in 1 s" in stream.getvalue()


def test_verbose_output_prefixes_every_line_with_its_process():
    progress, stream = make(terminal=False, verbose=True)
    progress.printed("gateway", ["one [red]", "two"])
    assert stream.getvalue().splitlines() == ["[gateway] one [red]", "[gateway] two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(EngineCore pid=7) INFO 11-21 03:54:41 [core.py:133] Loading  weights", "Loading weights"),
        ("2026-11-21 03:54:54 INFO medialane.worker.serve: worker c9 listens", "worker c9 listens"),
        ("INFO:     Waiting for application startup.", "Waiting for application startup."),
        ("Downloading: 12%", "Downloading: 12%"),
        ("x" * 100, "x" * 87 + "..."),
    ],
)
def test_status_is_taken_from_the_log_line(line, said):
    assert brief(line) == said
