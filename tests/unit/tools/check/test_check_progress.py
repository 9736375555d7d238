import io

from rich.console import Console

from medialane.runtime.phase import Phase, PhaseFile
from medialane.tools.check import CheckProgress
from waiting import eventually


def shown(*, force_terminal=None, **intervals):
    out = io.StringIO()
    return out, CheckProgress(Console(file=out, width=200, force_terminal=force_terminal), **intervals)


async def test_long_start_is_reported_with_the_servers_phase(tmp_path):
    phases = PhaseFile(tmp_path / "medialane.phase")
    phases.write(Phase("worker 0: loading [the] weights", 1, 2))
    out, progress = shown(tick_s=0.01, remind_s=0.02)
    async with progress.starting("medialane", phases):
        await eventually(lambda: "medialane: worker 0: loading [the] weights 1/2, 0 s" in out.getvalue())
    async with progress.starting("plain vLLM"):
        await eventually(lambda: "plain vLLM: starting, 0 s" in out.getvalue())
    assert out.getvalue().splitlines()[0] == "medialane: starting"
    assert "plain vLLM: ready after 0 s" in out.getvalue()


def test_cases_are_reported_now_and_then_without_a_terminal():
    out, progress = shown()
    progress.case(1, 2, "one image")
    assert out.getvalue() == ""
    out, progress = shown(remind_s=0)
    progress.case(2, 2, "video [tall]")
    assert out.getvalue() == "2/2 video [tall]\n"


def test_live_line_of_a_terminal_is_removed_at_the_end():
    out, progress = shown(force_terminal=True)
    progress.case(1, 2, "one image")
    progress.close()
    progress.close()
    assert out.getvalue().endswith("\x1b[2K")
