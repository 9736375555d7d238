"""A preparer compromised by a hostile file can affect nothing but its own results."""

import asyncio
import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio
from preparer_pools import fork_forkserver, forkserver_of, png, put, running

from builders import checked_arena
from medialane.arena import Arena, ArenaConfig
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from medialane.prepare.sandbox import Sandbox, memory_is_readable, read_into
from medialane.types.errors import InvalidImage, MedialaneError, MediaTooLarge, PreparationFailed, PreparerCrashed
from waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

FACTORY = "taken_over_processor:build_processor"
#: Of fork servers.
KINDS = ("exec'ed", "forked")
#: What distinguishes descriptors of one kind.
NUMBERED = re.compile(r"\[.*\]|-.*(?=\.arena)")
REFUSED = (errno.EPERM, errno.EACCES)
HERE = Path(__file__).parent


class TakenOver:
    def __init__(self, arena, pool):
        self.arena, self.pool, self.num_tries = arena, pool, 0

    async def tries(self, attack, *arguments):
        """The errno that it met, or None if it succeeded."""
        return (await self.outcome(attack, *arguments)).get("errno")

    async def outcome(self, attack, *arguments):
        self.num_tries += 1
        wanted = json.dumps({"attack": attack, "arguments": arguments}).encode()
        with put(self.arena, png()) as encoded:
            pin = await self.pool.prepare_item(encoded, wanted, f"{self.num_tries:064}")
        with pin:
            return json.loads(pin.value.header)


def missing_here_in_a_process():
    """What `medialane doctor` lists: it forks, which a process with one thread may do."""
    program = "from medialane.prepare.sandbox import missing_here; print(*missing_here())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@asynccontextmanager
async def taken_over_pool(arena, kind):
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)}
    config = PrepareConfig(num_preparers=1, image_timeout_s=10.0, start_timeout_s=30.0)
    pool = PreparerPool(
        config, factory=FACTORY, factory_config=b"", arena=arena, media=MediaConfig(), environment=environment
    )

    def fork():
        if kind == "forked":
            fork_forkserver(FACTORY, b"", environment)

    async with running(pool, fork):
        yield TakenOver(arena, pool)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def taken_over(request):
    arena = Arena.create(ArenaConfig(size_bytes=32 << 20))
    async with taken_over_pool(arena, request.param) as found:
        if missing_here_in_a_process():
            pytest.skip("this kernel, or a container, refuses a part of the sandbox; `medialane doctor` says which")
        yield found
    arena.close()


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("keep me")
    yield str(path)
    assert path.read_text() == "keep me"
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("attack", ["tcp", "tcp6", "udp", "unix", "netlink", "socketpair"])
async def test_network_is_unreachable(taken_over, attack):
    assert await taken_over.tries(attack) in REFUSED


@pytest.mark.parametrize("attack", ["connect", "bind"])
async def test_open_sockets_cannot_be_reconnected(taken_over, attack):
    for fd in range(3, 32):
        assert await taken_over.tries(attack, fd) in REFUSED


@pytest.mark.parametrize(
    "attack",
    [
        "write file", "append file", "update file", "make file", "truncate file", "truncate path", "remove file",
        "rename file", "make folder", "link", "chmod",
    ],
)  # fmt: skip
async def test_files_cannot_be_modified(taken_over, secret, attack):
    assert await taken_over.tries(attack, secret) in REFUSED


async def test_secrets_cannot_be_read(taken_over, secret):
    for path in (secret, "/etc/passwd", f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/mem", "/proc/1/environ"):
        assert await taken_over.tries("read file", path) in REFUSED
    for folder in ("/", str(Path(secret).parent), "/proc", "/dev/shm"):
        assert await taken_over.tries("list folder", folder) in REFUSED


@pytest.mark.parametrize("attack", ["make arena writable", "remove arena pages"])
async def test_arena_cannot_be_made_writable(taken_over, attack):
    assert await taken_over.tries(attack) in (errno.EACCES, errno.EPERM, errno.EINVAL)


async def test_arena_cannot_be_reopened(taken_over):
    assert await taken_over.tries("open arena", str(taken_over.arena.path)) in REFUSED


async def test_writing_to_a_foreign_entry_kills_the_writer_and_changes_nothing(taken_over):
    data = png(seed=5)
    with put(taken_over.arena, data) as other:
        with pytest.raises(PreparerCrashed):
            pytest.fail(f"it met {await taken_over.outcome('write arena', other.range.offset)}")
        held = taken_over.arena.view.entry(other.range)
        first = other.value.data_offset
        assert bytes(held[first : first + len(data)]) == data
    await eventually(lambda: taken_over.pool.stats().num_alive == 1)
    assert await taken_over.tries("clock") is None


@pytest.mark.parametrize(
    "attack", ["signal", "signal thread", "pidfd", "own signals", "pin", "priority", "write memory"]
)
async def test_other_processes_are_inaccessible(taken_over, attack):
    forkserver = forkserver_of(taken_over.pool.preparer_pids[0])
    for pid in (os.getpid(), forkserver, os.getppid()):
        assert await taken_over.tries(attack, pid) in REFUSED


async def test_child_processes_cannot_be_created(taken_over):
    for attack in ("fork", "vfork", "spawn", "exec"):
        assert await taken_over.tries(attack) in REFUSED


@pytest.mark.parametrize(
    "attack", ["signal all", "memory file", "unshare", "io_uring", "userfaultfd", "bpf", "mount", "become undumpable"]
)
async def test_other_system_calls_are_blocked(taken_over, attack):
    assert await taken_over.tries(attack) in REFUSED


async def test_limits_cannot_be_raised(taken_over):
    assert await taken_over.tries("change limits") in REFUSED
    assert await taken_over.tries("ptrace", os.getpid()) in REFUSED


@pytest.mark.parametrize("attack", ["thread", "late import", "clock"])
async def test_operations_needed_by_processors_work(taken_over, attack):
    assert await taken_over.tries(attack) is None


class LoopLag:
    """Measures how much CPU time the event loop takes at most in an iteration: what others do does not count."""

    def __init__(self):
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._measure())

    async def _measure(self):
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)  # time: an iteration ends
            now = time.thread_time()
            self.longest_s, before = max(self.longest_s, now - before), now

    async def end(self) -> float:
        await asyncio.sleep(0.01)  # time: for a last measurement
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.longest_s


@pytest.mark.parametrize("dimension", [1, 2, (1 << 64) - 1])
@pytest.mark.parametrize("num_dimensions", [17, 16_000, 490_000])
async def test_shape_that_no_tensor_has_blocks_the_store_for_no_time(taken_over, num_dimensions, dimension):
    """The product of 16,000 dimensions took seconds, that of as many as fit into a frame an hour."""
    lag = LoopLag()
    with pytest.raises(PreparerCrashed):
        await taken_over.tries("report shape", num_dimensions, dimension)
    assert await lag.end() < 0.3, "a few milliseconds on an idle machine"


@pytest.mark.parametrize(("attack", "number"), [("report tensors", 40_000), ("report header", (1 << 22) + 1)])
async def test_other_large_reports_block_the_store_for_no_time(taken_over, attack, number):
    lag = LoopLag()
    with pytest.raises(PreparerCrashed):
        await taken_over.tries(attack, number)
    assert await lag.end() < 0.3


async def test_size_of_a_reported_tensor_is_that_of_none(taken_over):
    with pytest.raises(PreparerCrashed):
        await taken_over.tries("report shape", 7, 1 << 40)
    with pytest.raises(MediaTooLarge):
        await taken_over.tries("report shape", 1, 1 << 40)


@pytest.mark.parametrize("addresses", [(), (8,), (8, 8), (1 << 47, 1 << 47)])
async def test_preparer_that_reports_invalid_addresses_of_tensors_is_replaced(taken_over, addresses):
    (before,) = taken_over.pool.preparer_pids
    with pytest.raises(PreparerCrashed):
        await taken_over.tries("report addresses", addresses)
    assert await taken_over.tries("clock") is None
    assert taken_over.pool.preparer_pids != (before,)
    assert taken_over.arena.stats().num_reservations == 0


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e300"])
async def test_reported_durations_do_not_change_what_the_store_expects(taken_over, seconds):
    with suppress(PreparerCrashed):
        await taken_over.tries("report durations", seconds)
    assert await taken_over.tries("clock") is None
    assert taken_over.pool.stats().queue_s == 0
    waiting = [asyncio.create_task(taken_over.tries("clock")) for _ in range(3)]
    await asyncio.sleep(0)
    assert taken_over.pool.stats().queue_s < 60
    await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    "code", ["arena_full", "authentication_failed", "startup_failed", "internal_error", "\n", "x" * 9999]
)
async def test_errors_that_preparers_do_not_raise_are_not_passed_on(taken_over, code):
    with pytest.raises(MedialaneError) as raised:
        await taken_over.tries("report error", code, "text of theirs")
    assert (type(raised.value), raised.value.message) == (PreparationFailed, "preparing this item failed")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the image is truncated", "the image is truncated"),
        ("image/x-icon is not supported", "image/x-icon is not supported"),
        ("first\nsecond\r\x1b[31m\x00\u202eend", "first second  [31m  end"),
        ("cannot open /usr/lib/python3/x.so, nor '/etc/passwd'", "cannot open ..., nor '...'"),
        ("see file:///etc/shadow and https://host/path", "see ... and https://host/path"),
        ("", "preparing this item failed"),
        ("x" * 4_000_000, "x" * 496 + " ..."),
        ("x" * 500, "x" * 500),
    ],
    ids=range(8),
)
async def test_text_of_reported_errors_is_short_and_plain(taken_over, message, expected):
    with pytest.raises(InvalidImage) as raised:
        await taken_over.tries("report error", "invalid_image", message)
    found = raised.value
    assert (found.message, found.param, found.retry_after_s) == (expected, None, None)


async def test_preparer_may_exit_and_the_pool_continues(taken_over):
    with pytest.raises(PreparerCrashed):
        await taken_over.tries("die")
    await eventually(lambda: taken_over.pool.stats().num_alive == 1)
    assert await taken_over.tries("clock") is None


async def test_pool_survived_all_attempts_without_restart(taken_over):
    assert taken_over.pool.stats().num_forkserver_restarts == 0
    assert taken_over.pool.degradation is None


def state_of(pid):
    """What a process may do and what it has, as the kernel says."""
    folder = Path(f"/proc/{pid}")
    parent, group, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()[1:]
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    names = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "Threads")
    limits = (folder / "limits").read_text().splitlines()
    # libuv makes two pipes in each fork of a process that has had a loop of it, as another test may have here.
    open_files = [name for fd in (folder / "fd").iterdir() if not (name := os.readlink(fd)).startswith("pipe:")]
    return {
        "status": {name: status[name] for name in (*names, *(name for name in status if name.startswith("Cap")))},
        "handled signals": int(status["SigCgt"], 16) & 0x7FFF_FFFF,  # 32 and 33 are the C library's own
        "limits": [line for line in limits if not line.startswith("Max address space")],
        "has a limit of memory": not any("Max address space" in line and "unlimited" in line for line in limits),
        "in the session of its fork server": group == session == parent,
        "descriptors": sorted(NUMBERED.sub("", name) for name in open_files),
        "folder": os.readlink(folder / "cwd"),
        "oom_score_adj": (folder / "oom_score_adj").read_text(),
    }


@pytest.fixture
def busy_store(tmp_path):
    """The process of the tests, as one that has things which a preparer must not get: a handler, a descriptor, and the
    ignored signals of a shell's background job."""
    background = dict.fromkeys((signal.SIGINT, signal.SIGQUIT), signal.SIG_IGN)
    handlers = {signal.SIGUSR1: lambda *_: None, **background}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    inheritable = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    yield
    os.close(inheritable)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("busy_store")
async def test_preparers_of_both_kinds_of_fork_server_have_the_same_rights_and_nothing_more(monkeypatch):
    monkeypatch.setenv("NOT_FOR_PREPARERS", "1")
    states = []
    for kind in KINDS:
        with checked_arena(32 << 20) as arena:
            async with taken_over_pool(arena, kind) as preparer:
                state = (await preparer.outcome("state"))["result"]
                state["environment"].pop("LC_CTYPE", None)  # set by a new Python where the locale is C
                await eventually(lambda: preparer.pool.spare_pid is not None)
                (pid,) = preparer.pool.preparer_pids
                states.append([state, state_of(pid), state_of(forkserver_of(pid)), state_of(preparer.pool.spare_pid)])
    for one, other in zip(*states, strict=True):
        assert one == other


async def test_process_vm_readv_is_available_and_invalid_addresses_raise():
    assert memory_is_readable()
    with pytest.raises(OSError, match="process_vm_readv"):
        read_into(os.getpid(), 8, memoryview(bytearray(8)))
    source = ctypes.create_string_buffer(b"abc")
    found = bytearray(3)
    read_into(os.getpid(), ctypes.addressof(source), memoryview(found))
    assert found == b"abc"


async def test_missing_sandbox_mechanisms_are_reported():
    assert list(Sandbox(system_calls=True, files=True).missing()) == []
    assert "network" in next(Sandbox(files=True).missing())
    assert "files" in next(Sandbox(system_calls=True).missing())
