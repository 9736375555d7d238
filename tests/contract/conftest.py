"""vLLM with the tiny model, shared by the contract tests of this session: its renderer, its app, and a whole
engine; and the renderers of all families."""

import os
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from medialane.testing.tiny_model import cache_folder

#: Read when torch is imported. Two threads on two busy cores would each spin while waiting for the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

VLLM_ARGS = [
    "--max-model-len=8192",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":8,"video":1}',
    "--mm-processor-cache-gb=0",
    "--trust-request-mm-kwargs",
]


#: Files whose tests share engines. They run first, and with pytest-xdist in one process, as do those of tests/hostile.
_ENGINE_FILES = ("test_vllm_engine", "test_vllm_kv", "test_simulated_engine")


def pytest_collection_modifyitems(items):
    places = [number for number, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    engines_first = sorted((items[n] for n in places), key=lambda item: not item.path.name.startswith(_ENGINE_FILES))
    for number, item in zip(places, engines_first, strict=True):
        items[number] = item


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            shared = {"engines": _ENGINE_FILES, "one gateway": "test_hostile"}
            return next((name for name, files in shared.items() if Path(file).name.startswith(files)), file)

    return FileScheduling(config, log)


@pytest.fixture
def private_folder():
    """Makes folders as an engine has one for its sockets. They are removed in the end."""
    from medialane.vllm_bridge.engine.plugin import PrivateFolder

    made = []

    def make():
        made.append(PrivateFolder())
        return made[-1]

    yield make
    for folder in reversed(made):
        folder.remove()


@pytest.fixture(scope="session")
def renderer(tiny_model):
    from vllm_configs import renderer_of

    renderer = renderer_of(tiny_model, VLLM_ARGS)
    yield renderer
    renderer.shutdown()


@pytest.fixture(scope="session")
def family_renderer():
    """vLLM's renderer by family name, created on first use."""
    made = []

    @cache
    def of(name):
        from tiny_families import CHECKED, DEPENDENT, PREPARED
        from vllm.model_executor.models import registry

        from medialane.vllm_bridge.seams.multimodal import processor_of
        from vllm_configs import renderer_of

        family = (CHECKED | PREPARED | DEPENDENT)[name]
        folder = family.build(cache_folder(os.environ))
        flags = [*family.flags, "--mm-processor-cache-gb=0"]
        with pytest.MonkeyPatch.context() as patch:
            # The first time on a machine: in a process of its own, for the sake of CUDA, it takes 10 s of a core.
            patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
            made.append(renderer_of(folder, flags))
        processor_of(made[-1])  # its modalities are ours from now on
        return made[-1]

    yield of
    for renderer in made:
        renderer.shutdown()


@pytest.fixture
def vllms_condition(monkeypatch):
    """vLLM's own class of message queues, in whose place our plugin puts one in this process, until the test ends."""
    from vllm.distributed.device_communicators import shm_broadcast

    from medialane.vllm_bridge.seams.cpu import Spinning

    original = Spinning.__mro__[1]
    monkeypatch.setattr(shm_broadcast, original.__name__, original)
    return original


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_server(tiny_model):
    from app_server import Server

    server = await Server.start(str(tiny_model), token_cache_bytes=1 << 20)
    yield server
    await server.close()


@pytest.fixture
def server(session_server, monkeypatch):
    """vLLM's app over a fake backend that is reset for each test."""
    from medialane.vllm_bridge.frontend import CONNECTOR

    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR)
    session_server.backend.reset()
    return session_server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model):
    """A real engine. Tests that use it run in the session's loop: `pytest.mark.asyncio(loop_scope="session")`."""
    from medialane.config import vllm_defaults
    from medialane.vllm_bridge.engine.engine import build_engine

    args = [arg for arg in VLLM_ARGS if not arg.startswith("--mm-processor-cache")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_defaults(str(tiny_model), args, on_gpu=False, num_workers=1).items():
            patch.setenv(name, value)
        # A forked EngineCore would inherit our "warnings are errors".
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        engine = build_engine(str(tiny_model), args)
    await engine.learn_encoder()
    yield engine
    await engine.close()
