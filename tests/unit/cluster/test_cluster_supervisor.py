import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scripted_processes import Recorder, is_running, make_supervisor, number_in, script_part

from medialane.cluster import child_process
from medialane.runtime.phase import exits_of_host, hang_problems
from medialane.runtime.resources import OomKills
from medialane.types.errors import StartupFailed
from supervised import running
from waiting import eventually, wait_until

IDLE = "ready(); stay()"


async def test_start_returns_when_every_process_is_ready_and_stop_leaves_none(tmp_path):
    seen = Recorder()
    slowly = "time.sleep(0.3); " + IDLE  # time: of a start
    parts = [script_part(tmp_path, f"worker {i}", slowly) for i in range(2)]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        assert seen.count("ready") == 2
        pids = supervisor.pids
        assert set(pids) == {"worker 0", "worker 1"}
    assert not any(map(is_running, pids.values()))
    assert supervisor.pids == {}


async def test_process_exiting_before_readiness_fails_the_start_with_its_reason(tmp_path):
    seen = Recorder()
    other = script_part(tmp_path, "gateway", IDLE)
    bad = script_part(tmp_path, "worker 0", "print('loading'); raise ValueError('no such model')")
    supervisor = make_supervisor(tmp_path, seen, [other, bad])
    with pytest.raises(StartupFailed) as failed:
        async with running(supervisor):
            pytest.fail("it is not ready")
    headline, *rest = failed.value.message.splitlines()
    assert headline == "worker 0 did not start: ValueError: no such model"
    assert any("| loading" in line for line in rest)
    assert supervisor.pids == {}


async def test_error_line_of_a_process_is_shown_alone(tmp_path):
    bad = script_part(tmp_path, "worker 0", "print('x' * 500); print('medialane: error: --port is taken'); sys.exit(2)")
    with pytest.raises(StartupFailed) as failed:
        async with running(make_supervisor(tmp_path, Recorder(), [bad])):
            pytest.fail("it is not ready")
    assert failed.value.message == "worker 0: --port is taken"


async def test_readiness_timeout_fails_the_start(tmp_path):
    slow = script_part(tmp_path, "worker 0", "stay()")
    with pytest.raises(StartupFailed, match=r"not ready after 0\.5 s"):
        async with running(make_supervisor(tmp_path, Recorder(), [slow], start_timeout_s=0.5)):
            pytest.fail("it is not ready")


async def test_missing_command_fails_the_start(tmp_path):
    part = script_part(tmp_path, "worker 0", "")
    part = type(part)("worker 0", ("/nonexistent/command",), {}, part.ready)
    with pytest.raises(StartupFailed, match="cannot be started: No such file"):
        async with running(make_supervisor(tmp_path, Recorder(), [part])):
            pytest.fail("it is not ready")


async def test_process_dying_later_is_restarted_and_others_continue(tmp_path):
    seen = Recorder()
    parts = [script_part(tmp_path, f"worker {i}", IDLE) for i in range(2)]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        before = supervisor.pids
        os.kill(before["worker 0"], signal.SIGKILL)
        await eventually(lambda: seen.count("ready", "worker 0") == 2)
        assert supervisor.pids["worker 1"] == before["worker 1"]
        assert supervisor.pids["worker 0"] != before["worker 0"]
        assert ("ended", "worker 0", "killed by SIGKILL") in seen.events


#: A process may be silent for 1 s, and busy for 3.
TICK_S = 0.1

BEATS = "ready()\nwhile True: beat(); time.sleep(0.1)"  # time: of a heartbeat


@pytest.mark.parametrize("script", [BEATS, IDLE], ids=["with beats", "while it starts"])
async def test_stopped_process_is_killed_and_restarted_in_bounded_time(tmp_path, script):
    seen = Recorder()
    parts = [script_part(tmp_path, name, script, tick_s=TICK_S) for name in ("store", "other")]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        before = supervisor.pids
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(before["store"], number)
            await asyncio.sleep(0.4)  # time: less than it may be stopped
        assert supervisor.pids == before
        os.kill(before["store"], signal.SIGSTOP)
        await eventually(lambda: seen.count("ready", "store") == 2)
        assert supervisor.pids["other"] == before["other"]
        assert any(how.startswith("hung: stopped by a signal") for how in seen.ends("store"))


@pytest.mark.parametrize("hang", ["time.sleep(60)", "sum(iter(int, 1))"])  # time: a hang
async def test_process_whose_loop_blocks_is_killed_and_restarted(tmp_path, monkeypatch, hang):
    seen, once = Recorder(), tmp_path / "once"
    blocks = f"ready(); beat()\nif not os.path.exists({str(once)!r}): open({str(once)!r}, 'w'); {hang}\n"
    parts = [script_part(tmp_path, *part, tick_s=TICK_S) for part in (("store", blocks + BEATS), ("other", BEATS))]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        other = supervisor.pids["other"]
        monkeypatch.setenv("MEDIALANE_PHASE_FILE", str(tmp_path / "store.phase"))
        await eventually(lambda: seen.count("ready", "store") == 2)
        (how,) = seen.ends("store")
        assert how.startswith("hung: no sign of life for ")
        assert (exits_of_host()["store"].num_hung, exits_of_host()["store"].num) == (1, 1)
        assert list(hang_problems()) == ["store has hung, and was restarted (see the log of serve)"]
        await asyncio.sleep(1.5)  # time: longer than a process may be silent
        assert (len(seen.ends("store")), supervisor.pids["other"]) == (1, other)
    assert not exits_of_host()


async def test_process_that_is_long_in_a_computation_is_no_hang(tmp_path):
    seen = Recorder()
    computes = "ready(); beat(); end = time.monotonic() + 1.7\nwhile time.monotonic() < end: pass\n"
    parts = [script_part(tmp_path, "store", computes + BEATS, tick_s=TICK_S)]
    async with running(make_supervisor(tmp_path, seen, parts)):
        await asyncio.sleep(2.5)  # time: of the computation, and some beats
    assert not seen.ends("store")


@pytest.mark.parametrize("script", ["sys.exit(69)", "ready(); time.sleep(0.5); sys.exit(69)"])  # time: seen to be ready
async def test_process_that_is_not_needed_ends_without_failing_the_start(tmp_path, script):
    seen = Recorder()
    unneeded = script_part(tmp_path, "store", script, not_needed="not needed: no media")
    async with running(make_supervisor(tmp_path, seen, [unneeded, script_part(tmp_path, "gateway", IDLE)])) as found:
        await eventually(lambda: seen.count("ended", "store", "not needed: no media") == 1)
        await asyncio.sleep(0.3)  # time: longer than the delay of a restart
        assert (seen.count("starting", "store"), set(found.pids)) == (1, {"gateway"})


async def test_crashing_process_is_restarted_with_backoff(tmp_path):
    seen = Recorder()
    part = script_part(tmp_path, "worker 0", "ready(); time.sleep(0.5); sys.exit(3)")  # time: seen ready before
    async with running(make_supervisor(tmp_path, seen, [part])):
        await eventually(lambda: len(seen.pauses) >= 4)
    assert seen.pauses[:4] == [0, 0.05, 0.1, 0.2], "the first time at once"
    assert ("ended", "worker 0", "exit status 3") in seen.events


async def test_process_that_is_ready_and_exits_without_an_error_again_and_again_is_restarted_with_backoff(tmp_path):
    seen = Recorder()
    part = script_part(tmp_path, "worker 0", "ready(); time.sleep(0.5); sys.exit(0)")  # time: seen ready before
    async with running(make_supervisor(tmp_path, seen, [part])):
        await eventually(lambda: len(seen.pauses) >= 4)
    assert seen.pauses[:4] == [0, 0.05, 0.1, 0.2], "the first time at once: it may have been asked to drain"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 9)", "killed by the kernel for lack of memory"),
        (
            "sys.exit(70)",  # as a worker whose EngineCore was killed
            "exit status 70, probably because the kernel killed one of its processes for lack of memory",
        ),
    ],
)
async def test_lack_of_memory_is_named_as_the_cause(tmp_path, monkeypatch, end, how):
    counters = tmp_path / "memory.events"
    counters.write_text("oom_kill 0\n")
    monkeypatch.setattr(child_process, "OomKills", partial(OomKills, cgroups=tmp_path))  # the kernel's counters
    killed = f"open({str(counters)!r}, 'w').write('oom_kill 1\\n'); {end}"
    seen = Recorder()
    later = script_part(tmp_path, "later", f"ready(); time.sleep(0.5); {killed}")  # time: seen ready before
    async with running(make_supervisor(tmp_path, seen, [later])):
        await eventually(lambda: seen.count("ended"))
    assert seen.count("ended", "later", how) == 1
    counters.write_text("oom_kill 0\n")
    in_start = script_part(tmp_path, "worker 0", f"print('medialane: error: no engine', flush=True); {killed}")
    with pytest.raises(StartupFailed) as failed:
        async with running(make_supervisor(tmp_path, seen, [in_start])):
            pytest.fail("it is not ready")
    assert failed.value.message == f"worker 0: no engine ({how})"


async def test_process_that_was_ready_and_dies_while_others_start_is_restarted(tmp_path):
    seen = Recorder()
    slow = script_part(tmp_path, "gateway", "time.sleep(1.5); " + IDLE)  # time: of a start
    supervisor = make_supervisor(tmp_path, seen, [script_part(tmp_path, "store", IDLE), slow])
    starting = asyncio.create_task(supervisor.start())
    try:
        await eventually(lambda: seen.count("ready", "store"))
        os.kill(supervisor.pids["store"], signal.SIGKILL)
        await starting
        assert (seen.count("ready", "store"), seen.pauses) == (2, [0])
    finally:
        await supervisor.stop()


async def test_start_waits_for_a_process_that_is_being_restarted(tmp_path):
    seen = Recorder()
    again = f"if os.path.exists(d := {str(tmp_path / 'died')!r}): time.sleep(0.5); {IDLE}\n"  # time: of a start
    dies = again + "open(d, 'w'); ready(); time.sleep(0.5)"  # time: seen to be ready
    slow = script_part(tmp_path, "gateway", "time.sleep(1); " + IDLE)  # time: of a start
    async with running(make_supervisor(tmp_path, seen, [script_part(tmp_path, "store", dies), slow])) as supervisor:
        assert seen.count("ready", "store") == 2
        assert set(supervisor.pids) == {"store", "gateway"}


async def test_process_that_keeps_exiting_during_the_start_fails_it_with_its_cause(tmp_path):
    script = "ready(); time.sleep(0.4); raise ValueError('broken')"  # time: seen to be ready
    crashing = script_part(tmp_path, "store", script)
    parts = [crashing, script_part(tmp_path, "gateway", "stay()")]
    with pytest.raises(StartupFailed, match=r"^store exited again and again: ValueError: broken"):
        async with running(make_supervisor(tmp_path, Recorder(), parts, restart_max_s=0.05)):
            pytest.fail("it is not ready")


async def test_child_processes_are_gone_before_a_restart(tmp_path):
    note = tmp_path / "child"
    part = script_part(tmp_path, "worker 0", f"open({str(note)!r}, 'w').write(str(child())); {IDLE}")
    seen = Recorder()
    async with running(make_supervisor(tmp_path, seen, [part])) as supervisor:
        grandchild = number_in(note)
        assert is_running(grandchild)
        os.kill(supervisor.pids["worker 0"], signal.SIGKILL)
        await eventually(lambda: seen.count("ended"))
        assert not is_running(grandchild)


async def test_process_ignoring_sigterm_is_killed_after_its_grace_period(tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + IDLE
    part = script_part(tmp_path, "worker 0", script, stop_timeout_s=0.5)
    supervisor = make_supervisor(tmp_path, Recorder(), [part])
    await supervisor.start()
    pid = supervisor.pids["worker 0"]
    started = time.monotonic()
    await supervisor.stop()
    assert 0.5 <= time.monotonic() - started < 3
    assert not is_running(pid)


async def test_kill_does_not_wait_for_a_slowly_stopping_process(tmp_path):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + IDLE
    seen = Recorder()
    supervisor = make_supervisor(tmp_path, seen, [script_part(tmp_path, "w", script, stop_timeout_s=30.0)])
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await eventually(lambda: seen.count("stopping"))
    supervisor.kill()
    async with asyncio.timeout(5):
        await stopping


async def test_higher_layers_are_stopped_first(tmp_path):
    order = tmp_path / "order"
    script = f"""
def end(*_):
    open({str(order)!r}, "a").write(sys.argv[1].rpartition("/")[2] + " ")
    sys.exit()
signal.signal(signal.SIGTERM, end)
{IDLE}"""
    parts = [script_part(tmp_path, "worker", script, layer=0), script_part(tmp_path, "gateway", script, layer=1)]
    async with running(make_supervisor(tmp_path, Recorder(), parts)):
        pass
    assert order.read_text().split() == ["gateway.ready", "worker.ready"]


async def test_process_waits_for_its_predecessor(tmp_path):
    seen = Recorder()
    first = script_part(tmp_path, "worker 0", "time.sleep(0.4); " + IDLE)  # time: of a start
    second = script_part(tmp_path, "worker 1", IDLE, after="worker 0")
    async with running(make_supervisor(tmp_path, seen, [first, second])):
        pass
    assert seen.events.index(("ready", "worker 0")) < seen.events.index(("starting", "worker 1"))


async def test_stop_during_the_start_stops_running_processes(tmp_path):
    supervisor = make_supervisor(tmp_path, Recorder(), [script_part(tmp_path, "w", "stay()")])
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: supervisor.pids)
    pid = supervisor.pids["w"]
    starting.cancel()
    await asyncio.wait((starting,))
    await supervisor.stop()
    assert not is_running(pid)


async def test_output_reaches_the_log_file_and_the_observer(tmp_path):
    seen = Recorder()
    part = script_part(tmp_path, "worker 0", "print('hello', flush=True); " + IDLE)
    async with running(make_supervisor(tmp_path, seen, [part])):
        await eventually(lambda: "worker 0: hello" in seen.lines)
    assert (tmp_path / "worker-0.log").read_text() == "hello\n"


STUBBORN = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scripted_processes import Recorder, make_supervisor, script_part
folder = Path(sys.argv[2])
script = '''
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".pids", "w").write(f"{os.getpid()} {child()}")
ready(); stay()
'''
async def main():
    supervisor = make_supervisor(folder, Recorder(), [script_part(folder, "worker", script)])
    await supervisor.start()
    (folder / "started").touch()
    await supervisor.wait()
asyncio.run(main())
"""


def test_sigkill_of_the_supervisor_leaves_no_process_even_if_sigterm_is_ignored(tmp_path):
    here = str(Path(__file__).parent)
    supervisor = subprocess.Popen([sys.executable, "-c", STUBBORN, here, str(tmp_path)])
    try:
        wait_until((tmp_path / "started").exists)
        pids = [int(pid) for pid in (tmp_path / "worker.ready.pids").read_text().split()]
        assert all(map(is_running, pids))
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: not any(map(is_running, pids)), timeout_s=12)


class Breaking(Recorder):
    """An observer that fails on `event` of the first worker."""

    def __init__(self, event):
        super().__init__()
        self.event = event

    def _break(self, event, part):
        if (event, part) == (self.event, "worker 0"):
            raise BrokenPipeError("no reader")

    def starting(self, part):
        super().starting(part)
        self._break("starting", part)

    def ready(self, part, seconds):
        super().ready(part, seconds)
        self._break("ready", part)

    def ended(self, part, how, restart_in_s):
        super().ended(part, how, restart_in_s)
        self._break("ended", part)

    def printed(self, part, lines):
        super().printed(part, lines)
        self._break("printed", part)


async def test_failed_supervision_of_one_process_restarts_and_others_continue(tmp_path, caplog):
    seen = Breaking("ended")
    parts = [script_part(tmp_path, f"worker {i}", IDLE) for i in range(2)]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        before = supervisor.pids
        os.kill(before["worker 0"], signal.SIGKILL)
        await eventually(lambda: seen.count("ready", "worker 0") == 2)
        assert supervisor.pids["worker 1"] == before["worker 1"]
        assert "worker 0: supervision failed" in caplog.text


async def test_failure_to_show_a_log_is_reported_once_and_ends_nothing(tmp_path, caplog):
    seen = Breaking("printed")
    script = "ready()\nfor _ in range(600): print('hello', flush=True); time.sleep(0.1)"  # time: between lines
    parts = [script_part(tmp_path, f"worker {i}", script) for i in range(2)]
    async with running(make_supervisor(tmp_path, seen, parts)) as supervisor:
        await eventually(lambda: seen.lines.count("worker 1: hello") > 5 and seen.lines.count("worker 0: hello") > 5)
        assert set(supervisor.pids) == {"worker 0", "worker 1"}
    assert caplog.text.count("its log cannot be read") == 1


async def test_failing_readiness_observer_does_not_stop_the_process(tmp_path):
    seen = Breaking("ready")
    part = script_part(tmp_path, "worker 0", IDLE)
    async with running(make_supervisor(tmp_path, seen, [part])) as supervisor:
        assert seen.count("ready", "worker 0") == 1
        await asyncio.sleep(0.3)  # time: in which it is not stopped
        assert is_running(supervisor.pids["worker 0"])


async def test_start_fails_if_supervision_fails(tmp_path):
    parts = [script_part(tmp_path, f"worker {i}", IDLE) for i in range(2)]
    supervisor = make_supervisor(tmp_path, Breaking("starting"), parts)
    with pytest.raises(StartupFailed, match="worker 0 cannot be supervised: BrokenPipeError"):
        async with running(supervisor):
            pytest.fail("it is not supervised")
    assert supervisor.pids == {}


async def test_failing_readiness_check_fails_the_start(tmp_path):
    class Unreadable:
        def reset(self):
            pass

        async def passes(self):
            raise UnicodeError("label empty")

    part = script_part(tmp_path, "worker 0", IDLE)
    part = type(part)("worker 0", part.argv, {}, Unreadable())
    with pytest.raises(StartupFailed, match="UnicodeError"):
        async with running(make_supervisor(tmp_path, Recorder(), [part])):
            pytest.fail("it is not ready")


async def test_end_of_supervision_is_reported_to_waiters(tmp_path):
    supervisor = make_supervisor(tmp_path, Recorder(), [script_part(tmp_path, "worker 0", IDLE)])
    async with running(supervisor):
        waiting = asyncio.create_task(supervisor.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


PHASES = """
import json
def enter(name, **more):
    file = os.environ["MEDIALANE_PHASE_FILE"]
    with open(file + ".new", "w") as new:
        json.dump({"name": name, **more}, new)
    os.replace(file + ".new", file)
"""


async def test_phases_of_a_process_are_reported_until_it_is_ready(tmp_path):
    seen, go = Recorder(), tmp_path / "go"
    loading = f"{PHASES}ready(); enter('loading', num_done=1, num_total=2)"
    waiting = f"while not os.path.exists({str(go)!r}): time.sleep(0.02)"  # time: until the test has seen it
    part = script_part(tmp_path, "worker", f"{loading}\n{waiting}\nenter('ready'); stay()")
    supervisor = make_supervisor(tmp_path, seen, [replace(part, is_ready_later=True)])
    await supervisor.start()
    await eventually(lambda: seen.phases == [("worker", "loading 1/2")])
    assert not seen.count("ready", "worker")
    go.touch()
    await eventually(lambda: seen.count("ready", "worker") == 1)
    await supervisor.stop()
    assert not list(tmp_path.glob("*.phase*"))
