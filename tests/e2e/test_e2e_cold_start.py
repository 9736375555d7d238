"""`serve` without a warm process: each process starts from scratch, answers alike, and is what a fork would be."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import START_S, MedialaneProcess
from openai_http import Answer, OpenAiHttp, assert_same, chat, picture, text, video
from process_tree import command_of, descendants, parent_of

from poison import PROGRAM
from waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.whole]

ASK = text("Describe the picture.")
BODIES = {
    "text": chat(ASK),
    "image": chat(picture(800), ASK),
    "stream of two images": chat(
        picture(801), text("and"), picture(802), ASK, stream=True, stream_options={"include_usage": True}
    ),
    "video": chat(video(5, num_frames=4), ASK),
    "logprobs": chat(picture(803), ASK, logprobs=True, top_logprobs=3),
}
#: Of /proc/PID/status: signals, privileges, sandbox, placement.
STATUS = (
    "Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
    "NoNewPrivs", "Seccomp", "Seccomp_filters", "Cpus_allowed_list", "Mems_allowed_list", "CoreDumping", "THP_enabled",
)  # fmt: skip
#: Signals that people and supervisors send. Others are caught by libraries, and for a fork server that is exec'ed.
SENT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGTERM)
KINDS = {
    "store": "medialane store",
    "worker": "medialane worker",
    "gateway": "medialane gateway",
    "fork server": "medialane forkserver",
    "preparer": "medialane preparer",
    "engine": "EngineCore",
}


@pytest.fixture(scope="module")
def starting_cold(serve, vllm_environ, server_flags, tmp_path_factory):
    runtime = Path(tempfile.mkdtemp(prefix="ml-cold-", dir="/tmp"))
    process = MedialaneProcess.spawn(
        "serve",
        serve.model,
        ["--workers", "1", "--verbose", "--no-warm-start", "--preparers", "1", "--arena-size", "256MiB"],
        server_flags,
        environ={**vllm_environ, "XDG_RUNTIME_DIR": str(runtime)},
        log=tmp_path_factory.mktemp("cold") / "serve.log",
        program=[str(PROGRAM)],
    )
    yield process
    process.stop()
    shutil.rmtree(runtime)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cold(starting_cold):
    await starting_cold.answers()
    ready = "Ctrl-C stops it"
    await eventually(lambda: ready in starting_cold.log.read_text(), "it is ready", START_S, more=starting_cold.tail)
    return starting_cold


def traits(pid: int) -> dict[str, object]:
    """What a process has from the one that has started it, and has set itself."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    limits = (folder / "limits").read_text().splitlines()  # that of addresses is what is used at first, and some more
    return {
        **{name: status[name].strip() for name in STATUS if name in status},
        "SigCgt": [number.name for number in SENT if int(status["SigCgt"], 16) >> (number - 1) & 1],
        "limits": [line for line in limits if not line.startswith("Max address space")],
        "has limited addresses": not any(line.split()[3] == "unlimited" for line in limits if "address space" in line),
        "oom_score_adj": (folder / "oom_score_adj").read_text(),
        "folder": os.readlink(folder / "cwd"),
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "policy": os.sched_getscheduler(pid),
        "leads a session": os.getsid(pid) == os.getpgid(pid) == pid,
        "num_terminals": sum(os.readlink(entry.path).startswith("/dev/pts") for entry in os.scandir(folder / "fd")),
        "stdin": os.readlink(folder / "fd" / "0"),
    }


def whole(answer: Answer) -> object:
    """An answer without how it was cut into events: on a busy machine the events of several steps are one."""
    if not answer.events:
        return answer.json
    (finish_reason,) = [c["finish_reason"] for e in answer.events for c in e["choices"] if c["finish_reason"]]
    usage = [event["usage"] for event in answer.events if event.get("usage")]
    return {"content": answer.content, "ids": answer.ids, "finish_reason": finish_reason, "usage": usage}


def of_kind(serve: MedialaneProcess, kind: str) -> int:
    return next(pid for pid in descendants(serve.pid) if KINDS[kind] in command_of(pid))


@pytest.mark.parametrize("name", BODIES)
async def test_answers_of_cold_and_warm_processes_are_equal(cold, ours, name):
    client = OpenAiHttp(cold.base_url, cold.model)
    warm, scratch = await ours.succeed(BODIES[name]), await client.succeed(BODIES[name])
    assert_same(whole(scratch), whole(warm))


@pytest.mark.parametrize("kind", KINDS)
async def test_fork_has_the_traits_of_a_process_that_was_started_from_scratch(cold, serve, kind):
    warm, scratch = of_kind(serve, kind), of_kind(cold, kind)
    assert traits(warm) == traits(scratch)


@pytest.mark.parametrize("kind", ["store", "worker", "gateway"])
async def test_fork_is_a_child_of_serve(serve, kind):
    assert parent_of(of_kind(serve, kind)) == serve.pid
    assert "is started from scratch" not in serve.log.read_text()
