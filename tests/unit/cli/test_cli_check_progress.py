import io

from rich.console import Console

from medialane.cli.check import progress as progress_module
from medialane.cli.check.progress import CheckProgress
from waiting import eventually


def shown(**options):
    out = io.StringIO()
    return out, CheckProgress(Console(file=out, width=200, **options))


async def test_long_start_is_reported_with_the_last_line_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "_TICK_S", 0.01)
    monkeypatch.setattr(progress_module, "_REMIND_S", 0.02)
    log = tmp_path / "log"
    log.write_text("(EngineCore pid=7) INFO 11-21 03:54:41 [core.py:133] Loading weights [50%]\n\n")
    out, progress = shown()
    async with progress.starting("plain vLLM", log):
        await eventually(lambda: "Loading weights [50%]" in out.getvalue())
    assert out.getvalue().splitlines()[0] == "plain vLLM: starting"
    assert "plain vLLM: ready after 0 s" in out.getvalue()


def test_cases_are_reported_now_and_then_without_a_terminal(monkeypatch):
    out, progress = shown()
    progress.case(1, 2, "one image")
    assert out.getvalue() == ""
    monkeypatch.setattr(progress_module, "_REMIND_S", 0)
    progress.case(2, 2, "video [tall]")
    assert out.getvalue() == "2/2 video [tall]\n"


def test_live_line_of_a_terminal_is_removed_at_the_end():
    out, progress = shown(force_terminal=True)
    progress.case(1, 2, "one image")
    progress.close()
    progress.close()
    assert out.getvalue().endswith("\x1b[2K")
