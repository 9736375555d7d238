"""`medialane serve` for chaos (chaotic/medialane): two gateways, and real or simulated workers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from injections import Chaos, WholeHost
from medialane_process import START_S, MedialaneProcess
from mixed_load import MixedLoad, asking
from openai_http import OpenAiHttp
from scenario import Scenario
from served_processes import RESTART_S, ServedProcesses, is_running
from small_dummies import with_small_dummies

from host_state import HostState, as_before, state_of, store_link
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, TINY_MODEL_FLAGS
from waiting import eventually

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "chaotic" / "medialane"
SERVER_FLAGS = (
    *TINY_MODEL_FLAGS,
    # As in tests/e2e/shared_servers.py: in bfloat16, how a prompt is prefilled decides between equally probable tokens.
    "--dtype=float32",
    with_small_dummies({"image": 8, "video": 1}),
    "--enable-mm-embeds",
    "--trust-request-mm-kwargs",
    f"--kv-cache-memory-bytes={256 << 20}",
)
#: The arena has room for all media of the tests. Their origins are on the loopback interface.
FLAGS = ("--gateways", "2", "--preparers", "1", "--arena-size", "256MiB", "--allow-media-network", "127.0.0.0/8")
#: What dies again and again is restarted at once. What is stopped for longer than heartbeats may be missing is lost.
CHAOS_FLAGS = ("--restart-reset", "0.05", "--rpc-heartbeat-timeout", "5", "--worker-stall-timeout", "4", "--verbose")
#: Of descriptors, above the number before: connections that clients keep open for their next request.
MAX_MORE_DESCRIPTORS = 6


@dataclass
class Disk:
    """A small tmpfs for the logs, which only `serve` and its processes see: /proc shows it to others."""

    folder: Path

    def prefix(self) -> list[str]:
        command = 'mount -t tmpfs -o size=16m none "$0" && exec "$@"'
        return ["unshare", "-m", "sh", "-c", command, str(self.folder)]

    def path(self, serve: MedialaneProcess) -> Path:
        return Path(f"/proc/{serve.pid}/root{self.folder}")


def spawn(
    model: Path,
    *,
    engine: Literal["vllm", "simulated"],
    flags: Sequence[str],
    shared_memory: Path,
    runtime_directory: Path,
    log: Path,
    prefix: Sequence[str] = (),
) -> MedialaneProcess:
    """`prefix` are the words of a command that becomes `serve`."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **TINY_MODEL_ENVIRON,
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime_directory),
        "CHAOS_ENGINE": engine,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return MedialaneProcess.spawn(
        "serve",
        str(model),
        [*FLAGS, *CHAOS_FLAGS, *flags, "--arena-directory", str(shared_memory)],
        SERVER_FLAGS,
        environ=environ,
        log=log,
        program=[str(PROGRAM)],
        prefix=prefix,
    )


async def ready(serve: MedialaneProcess, num_workers: int) -> tuple[ServedProcesses, OpenAiHttp]:
    """Wait until requests are answered by all workers: the first is enough for `serve` to say that it is ready."""
    await serve.answers()
    await eventually(lambda: "Ctrl-C stops it" in serve.log.read_text(), "serve is ready", START_S, more=serve.tail)
    client = OpenAiHttp(serve.base_url, serve.model)

    async def has_all() -> bool:
        return (await client.metrics()).value("medialane_worker_state", state="ready") == num_workers

    await eventually(has_all, "all workers are ready", START_S, more=serve.tail)
    return ServedProcesses(serve), client


async def survives(
    processes: ServedProcesses,
    client: OpenAiHttp,
    scenario: Scenario,
    chaos: Chaos,
    *,
    shared_memory: Path,
    with_embeds: bool,
    ended_s: float,
    num_answers: int = 0,
    right: OpenAiHttp | None = None,
) -> MixedLoad:
    """Run a scenario under load, until there were that many answers. Raises AssertionError, with the whole schedule,
    unless every answer is right, as of the server `right` if there is one, and nothing is left of what was done."""
    serve, load = processes.serve, None
    try:
        async with store_link(serve.store_address, shared_memory) as link:

            async def state() -> HostState:
                page = await client.metrics()
                ready, in_flight = (
                    page.value("medialane_worker_state", state="ready"),
                    page.value("medialane_worker_in_flight"),
                )
                return await state_of(serve.pid, link, ready, in_flight)

            async with as_before(state, RESTART_S):
                descriptors = await processes.num_descriptors()
                whole = WholeHost(processes, client)
                settings = {"with_embeds": with_embeds, "ended_s": ended_s, "right": right}
                async with (
                    whole.watched(),
                    asking(client, seed=scenario.seed, num_new=int(scenario.seconds), **settings) as load,
                ):
                    await chaos.run(scenario, load, whole)
                    await whole.wait("in the end")
                    await load.answers(len(load.repeated))
                    while load.counts["answer"] < num_answers:
                        await load.answers(len(load.repeated))
                await load.all_that_was_ready_is_a_hit()
            now = await processes.num_descriptors()
            grown = {pid: (n, now[pid]) for pid, n in descriptors.items() if now.get(pid, 0) > n + MAX_MORE_DESCRIPTORS}
            assert not grown, f"descriptors left: {grown}"
    except BaseException as error:
        # By the seed and the length the same is done again.
        error.add_note(f"the scenario:\n{scenario}\nthe load: {load}")
        raise
    print(f"\nseed {scenario.seed}, {scenario.seconds:g} s: {load}")  # noqa: T201 - what was covered, for `make chaos`
    return load


async def stop_leaves_nothing(processes: ServedProcesses, shared_memory: Path, runtime_directory: Path) -> None:
    everyone = await processes.all()
    assert processes.serve.stop() == 0, processes.serve.tail()
    assert not [pid for pid in everyone if is_running(pid)]
    assert not os.listdir(shared_memory)
    assert not os.listdir(runtime_directory)
