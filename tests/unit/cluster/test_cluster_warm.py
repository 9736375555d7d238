import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from process_tree import command_of, descendants
from scripted_processes import Recorder, is_running, make_supervisor, number_in, script_part

from medialane.cluster import (
    ChildProcess,
    ForkedChild,
    ForkRequest,
    NotForked,
    ProcessSpec,
    SocketExists,
    WarmProcess,
)
from medialane.runtime import heartbeat
from medialane.runtime.linux import set_subreaper
from medialane.wire.child_channel import send
from waiting import eventually

PROGRAM = Path(__file__).with_name("warm_program.py")


class Host:
    """A warm process and the output of its forks."""

    def __init__(self, folder):
        self.output = folder / "output"
        self.output.touch()
        self.warm = WarmProcess(folder / "warm.sock", {})

    async def start(self):
        environ = {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        with self.output.open("ab") as log:
            self.process = ChildProcess.spawn(
                [sys.executable, str(PROGRAM), str(self.warm.path)], environ, log.fileno()
            )
        await eventually(self.warm.path.is_socket, timeout_s=30)

    async def fork(self, *argv, environ=None, pass_fds=(), timeout_s=10.0):
        with self.output.open("ab") as log:
            pid = await self.warm.fork(argv, environ or {}, log.fileno(), pass_fds, timeout_s=timeout_s)
        return ChildProcess(ForkedChild(pid), 0.0)

    def facts(self):
        return [json.loads(line) for line in self.output.read_text().splitlines() if line.startswith("{")]


def has_reaped_another() -> bool:
    return os.waitpid(-1, os.WNOHANG) != (0, 0)


@pytest.fixture
async def host(tmp_path):
    set_subreaper(on=True)
    host = Host(tmp_path)
    await host.start()
    yield host
    await host.process.stop(5)
    set_subreaper(on=False)


async def test_fork_is_a_child_with_its_own_session_environment_command_and_descriptors(host):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        inode = os.readlink(f"/proc/self/fd/{listener.fileno()}")
        child = await host.fork("a", "-b", environ={"X": "1"}, pass_fds=[listener.fileno()])
        assert await child.wait() == 7
        (facts,) = host.facts()
        assert facts["argv"] == facts["sys_argv"] == ["a", "-b"]
        assert facts["environ"] == {"X": "1", "BY_IMPORT": "1"}
        assert (facts["pid"], facts["parent"], facts["leads"]) == (child.pid, os.getpid(), True)
        output = str(host.output)
        assert facts["descriptors"] == {
            "0": "/dev/null", "1": output, "2": output, str(listener.fileno()): inode,
        }  # fmt: skip


async def test_forks_that_need_the_model_wait_until_it_is_read_and_the_others_do_not(host):
    children = await asyncio.gather(host.fork("gateway"), host.fork("worker"))
    for child in children:
        await child.wait()
    assert {facts["argv"][0]: facts["read"] for facts in host.facts()} == {"worker": [], "gateway": ["model"]}
    assert host.facts()[0]["argv"] == ["worker"]


async def test_model_is_read_once(host):
    for _ in range(2):
        await (await host.fork("gateway")).wait()
    assert [facts["read"] for facts in host.facts()] == [["model"], ["model"]]


async def test_model_is_read_although_no_fork_needs_it_yet(host):
    async def has_read():
        await (await host.fork("x")).wait()
        return host.facts()[-1]["read"] == ["model"]

    deadline = asyncio.get_running_loop().time() + 30
    while not await has_read():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(heartbeat.BEAT_S + 0.2)  # time: the model is read when there are no requests


async def test_forks_draw_different_random_numbers(host):
    for _ in range(2):
        await (await host.fork("x")).wait()
    first, second = (facts["drawn"] for facts in host.facts())
    assert all(a != b for a, b in zip(first, second, strict=True))


async def test_fork_of_a_request_that_was_given_up_ends(host):
    with pytest.raises(NotForked, match="has not answered"):
        await host.fork("store", timeout_s=0.1)
    await (await host.fork("gateway")).wait()
    assert [facts["argv"] for facts in host.facts()] == [["gateway"]]
    await eventually(has_reaped_another, "it was made, and exits")
    assert "Traceback" not in host.output.read_text()


async def test_fork_ends_if_the_supervisor_exits_before_it_has_said_what_it_becomes(host):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, host.output.open("ab") as log:
        sock.connect(str(host.warm.path))
        send(sock, ForkRequest("x"), [log.fileno()], max_bytes=1000)
        pid = int(await asyncio.to_thread(sock.recv, 20))
        assert is_running(pid)
    assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 1
    assert not host.facts()


async def test_command_line_that_is_too_long_for_a_message_is_no_fork(host):
    with pytest.raises(NotForked, match="exceeds the limit"):
        await host.fork("x", "y" * 200_000)
    await (await host.fork("x")).wait()
    assert [facts["argv"] for facts in host.facts()] == [["x"]]
    await eventually(has_reaped_another)


async def test_forks_outlive_the_warm_process(host):
    child = await host.fork("stay")
    await eventually(host.facts)
    host.process.kill()
    await host.process.wait()
    assert is_running(child.pid)
    assert await child.stop(5) == -signal.SIGTERM
    with pytest.raises(NotForked, match="cannot be asked"):
        await host.fork("x")


@pytest.mark.timeout(120)  # on a busy machine a fork takes half a second
async def test_many_forks_leave_nothing_behind(host):
    def state():
        folder = Path(f"/proc/{host.process.pid}")
        return len(list((folder / "fd").iterdir())), (folder / f"task/{host.process.pid}/children").read_text()

    await (await host.fork("x")).wait()
    before = state(), len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        assert await (await host.fork("x")).wait() == 7
    assert (state(), len(os.listdir("/proc/self/fd"))) == before
    assert before[0][1] == ""


async def test_process_is_started_from_scratch_if_there_is_no_warm_process(tmp_path, caplog):
    class Ready:
        def reset(self):
            (tmp_path / "started").unlink(missing_ok=True)

        async def passes(self):
            return (tmp_path / "started").exists()

    spec = ProcessSpec(
        "part",
        (sys.executable, "-P", "-c", "import signal, sys; open(sys.argv[1], 'w').close(); signal.pause()",
         str(tmp_path / "started")),
        {},
        Ready(),
        warm=WarmProcess(tmp_path / "none.sock", {}),
    )  # fmt: skip
    supervisor = make_supervisor(tmp_path, Recorder(), [spec])
    try:
        await supervisor.start()
        assert is_running(supervisor.pids["part"])
        assert "part is started from scratch: the warm process cannot be asked" in caplog.text
    finally:
        await supervisor.stop()


ORPHAN = """
middle = os.fork()
if middle == 0:
    orphan = os.fork()
    if orphan == 0:
        stay()
    with open({note!r}, "w") as note:
        note.write(str(orphan))
    os._exit(0)
os.waitpid(middle, 0)
ready()
stay()
"""


async def test_orphans_are_reaped_although_the_orphan_reaper_was_killed(tmp_path):
    note = tmp_path / "orphan"
    part = script_part(tmp_path, "part", ORPHAN.format(note=str(note)), warm=WarmProcess(tmp_path / "none.sock", {}))
    supervisor = make_supervisor(tmp_path, Recorder(), [part])
    try:
        await supervisor.start()
        orphan = number_in(note)
        (reaper,) = [pid for pid in descendants(os.getpid()) if "orphan reaper" in command_of(pid)]
        for pid in (reaper, orphan):
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not {reaper, orphan} & set(descendants(os.getpid())), "both are waited for")
    finally:
        await supervisor.stop()


async def test_fork_whose_environment_may_change_an_import_is_refused(host):
    with pytest.raises(NotForked, match="LD_PRELOAD may change what is imported"):
        await host.fork("x", environ={"LD_PRELOAD": "/lib/x.so"})


async def test_process_that_exits_while_the_warm_process_is_stopped_is_started_from_scratch(tmp_path, caplog):
    path, started = tmp_path / "warm.sock", tmp_path / "started"
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    argv = (sys.executable, str(PROGRAM), str(path), str(tmp_path / "once"))
    first = ProcessSpec("warm", argv, environ, SocketExists(path), layer=-1)

    class IsRunning:
        """Ready when its log has what the program prints of a fork, or it was started from scratch."""

        def reset(self):
            started.unlink(missing_ok=True)
            (tmp_path / "part.log").write_text("")

        async def passes(self):
            return '"argv": ["stay", ' in (tmp_path / "part.log").read_text() or started.exists()

    program = "import signal, sys; open(sys.argv[2], 'w').close(); signal.pause()"
    argv = (sys.executable, "-P", "-c", program, "stay", str(started))
    part = ProcessSpec("part", argv, {}, IsRunning(), after="warm", warm=WarmProcess(path, {}))
    observer = Recorder()
    supervisor = make_supervisor(tmp_path, observer, [first, part], start_timeout_s=30.0)
    try:
        await supervisor.start()
        assert "from scratch" not in caplog.text
        os.kill(supervisor.pids["warm"], signal.SIGSTOP)
        os.kill(supervisor.pids["part"], signal.SIGKILL)
        await eventually(lambda: observer.count("ready", "part") == 2, timeout_s=30)
        assert "part is started from scratch: the warm process " in caplog.text
    finally:
        await supervisor.stop()


async def test_process_that_exits_with_the_warm_one_waits_for_the_next_and_is_its_fork(tmp_path, caplog):
    path = tmp_path / "warm.sock"
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    warm = ProcessSpec("warm", (sys.executable, str(PROGRAM), str(path)), environ, SocketExists(path), layer=-1)

    class IsFork:
        """Ready when its log has what the program prints of a fork."""

        def reset(self):
            (tmp_path / "part.log").write_text("")

        async def passes(self):
            return '"argv": ["stay"]' in (tmp_path / "part.log").read_text()

    argv = (sys.executable, "-P", "-m", "no_such_module", "stay")
    part = ProcessSpec("part", argv, {}, IsFork(), after="warm", warm=WarmProcess(path, {}))
    observer = Recorder()
    supervisor = make_supervisor(tmp_path, observer, [warm, part], start_timeout_s=30.0)
    try:
        await supervisor.start()
        for name in ("warm", "part"):
            os.kill(supervisor.pids[name], signal.SIGKILL)
        await eventually(lambda: observer.count("ready", "part") == 2, timeout_s=30)
        assert "from scratch" not in caplog.text
    finally:
        await supervisor.stop()
