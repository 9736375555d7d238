"""One family's servers at a time: plain vLLM, and `medialane serve` with one worker and one preparer.

Both start side by side, which takes most of a family's minute; `pytest tests/e2e_families -k gemma3` runs one.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from medialane_process import ONE_PROCESS_ENGINE, START_S, STOP_S, MedialaneProcess
from openai_http import OpenAiHttp
from tiny_families import FAMILIES, Family

from medialane.cli.server_process import plain_vllm
from medialane.vllm_bridge.tiny_model import TINY_MODEL_ENVIRON, cache_folder

MEDIALANE_FLAGS = ("--workers", "1", "--preparers", "1", "--arena-size", "256MiB", "--verbose")


#: Families that `make test` starts: video with timestamps, its own `apply`, audio and mixed modalities.
#: Of the others one is the model of tests/e2e, and the rest differ in preparation alone, which tests/contract compares.
_ALWAYS = ("qwen3_vl", "paligemma", "qwen2_5_omni")


@dataclass(frozen=True)
class Servers:
    """Clients of two servers of one model."""

    family: Family
    ours: OpenAiHttp
    plain: OpenAiHttp


@pytest.fixture(scope="session")
def environ() -> Iterator[dict[str, str]]:
    """The whole environment of all processes. Sockets go to a short path, since theirs are bounded."""
    runtime = Path(tempfile.mkdtemp(prefix="ml-fam-"))
    yield {**TINY_MODEL_ENVIRON, **os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    shutil.rmtree(runtime)


def pytest_collection_modifyitems(config, items):
    """Skip the requests that a family does not support."""
    unfit = [
        item for item in items if item.path.parent == Path(__file__).parent and not _is_taken(item.callspec.params)
    ]
    config.hook.pytest_deselected(items=unfit)
    items[:] = [item for item in items if item not in unfit]


def _is_taken(params: dict) -> bool:
    limits = FAMILIES[params["servers"]].limits
    return all(limits.get(modality, 0) >= count for modality, count in params.get("counts", {}).items())


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[pytest.param(name, marks=() if name in _ALWAYS else pytest.mark.slow) for name in FAMILIES],
)
async def servers(request, environ, tmp_path_factory):
    """The `Servers` of each family in turn."""
    family = FAMILIES[request.param]
    model, logs = str(family.build(cache_folder(os.environ))), tmp_path_factory.mktemp(family.name)
    ours = MedialaneProcess.spawn(
        "serve", model, MEDIALANE_FLAGS, family.flags, environ=environ, log=logs / "serve.log"
    )
    flags = (*family.flags, ONE_PROCESS_ENGINE)
    try:
        async with plain_vllm(model, flags, environ=environ, log=logs / "plain.log", start_s=START_S) as plain:
            await ours.answers()
            yield Servers(
                family,
                OpenAiHttp(ours.base_url, model),
                OpenAiHttp(plain.base_url.removesuffix("/v1"), plain.model),
            )
            ours.process.terminate()  # both servers stop at the same time
        assert ours.process.wait(STOP_S) == 0
    finally:
        ours.stop()
