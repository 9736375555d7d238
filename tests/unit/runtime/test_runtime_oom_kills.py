"""What an exit says about lack of memory: counters of cgroups of both versions, and of the host."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

import pytest

from medialane.runtime.resources import OomKills
from waiting import eventually

#: Where the memory controller of this machine is, for the test with a real kill.
CONTROLLERS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMIT_BYTES = 64 << 20
GREEDY = f"import sys; sys.stdin.readline(); bytearray({4 * LIMIT_BYTES}); print('not killed')"


@pytest.fixture
def counters(tmp_path):
    """The folder of files in place of the machine's counters; there are none at first."""
    return tmp_path


def count(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"oom {number + 3}\noom_kill {number}\noom_group_kill 0\n")


@pytest.fixture(params=["v2", "v1"])
def cgroup(request, counters):
    return counters / {"v2": "cgroup/memory.events", "v1": "cgroup/memory/memory.oom_control"}[request.param]


@pytest.fixture
def watching(counters):
    """Makes what is tested, for this process."""
    made, places = [], {"cgroups": counters / "cgroup", "host_counters": counters / "vmstat"}

    def watch(**options):
        made.append(OomKills(os.getpid(), **places, poll_s=0.01, **options))
        return made[-1]

    yield watch
    for found in made:
        found.close()


async def test_kill_in_the_cgroup_is_the_cause_of_sigkill_and_probably_of_an_exit(cgroup, watching):
    count(cgroup, 2)
    found = watching()
    assert found.describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert found.describe_exit(70) == "exit status 70"
    count(cgroup, 3)
    assert found.describe_exit(-signal.SIGKILL) == "killed by the kernel for lack of memory"
    assert found.describe_exit(70) == (
        "exit status 70, probably because the kernel killed one of its processes for lack of memory"
    )
    assert found.describe_exit(0) == "exit status 0"


async def test_kill_somewhere_on_the_host_is_probably_the_cause(counters, watching):
    count(counters / "vmstat", 0)
    found = watching()
    count(counters / "vmstat", 1)
    expected = "killed by SIGKILL, probably by the kernel for lack of memory"
    assert found.describe_exit(-signal.SIGKILL) == expected


async def test_counters_of_the_host_do_not_matter_where_the_cgroup_has_its_own(counters, cgroup, watching):
    count(cgroup, 0)
    count(counters / "vmstat", 0)
    found = watching()
    count(counters / "vmstat", 1)
    assert found.describe_exit(-signal.SIGKILL) == "killed by SIGKILL"


async def test_earlier_kill_is_not_the_cause(cgroup, watching):
    count(cgroup, 0)
    found = watching(recent_s=0.05)
    count(cgroup, 1)
    await eventually(lambda: found.describe_exit(70) == "exit status 70")


async def test_no_counters_explain_nothing(counters, watching):
    assert watching().describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert watching().describe_exit(-63) == "killed by signal 63"


@pytest.fixture
def small_cgroup():
    """A new cgroup with little memory."""
    root = next((found for found in CONTROLLERS if (found / "cgroup.procs").exists()), CONTROLLERS[1])
    folder = root / f"medialane-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = next(found for name in ("memory.limit_in_bytes", "memory.max") if (found := folder / name).exists())
        limit.write_text(str(LIMIT_BYTES))
        with suppress(OSError):  # without swap accounting
            next(folder.glob("memory.memsw.limit_in_bytes")).write_text(str(LIMIT_BYTES))
        yield folder
    except (OSError, StopIteration) as error:
        pytest.skip(f"NOT TESTED: a real kill for lack of memory: no cgroup can be made here: {error!r}")
    finally:
        with suppress(OSError):
            folder.rmdir()


async def test_real_kill_is_recognized(small_cgroup):
    command = [sys.executable, "-I", "-S", "-c", GREEDY]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    (small_cgroup / "cgroup.procs").write_text(str(process.pid))
    found = OomKills(process.pid)
    output, _ = await process.communicate(b"\n")
    if output:
        pytest.skip("NOT TESTED: a real kill for lack of memory: the limit of the cgroup has no effect")
    assert found.describe_exit(process.returncode) == "killed by the kernel for lack of memory"
    found.close()
