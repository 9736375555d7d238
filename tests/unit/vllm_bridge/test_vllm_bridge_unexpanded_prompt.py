"""What a worker does for each stage, and whose fault a failure is. No model: the renderer is a stub."""

import errno
from http import HTTPStatus
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.v1.engine.exceptions import EngineDeadError

from medialane.types.errors import (
    InvalidAudio,
    InvalidFeature,
    PromptRejected,
    Unavailable,
    UnsupportedMediaType,
    WorkerLost,
)
from medialane.types.feature import MediaPayload
from medialane.types.media import STAGES, MediaSize
from medialane.types.request import EngineRequest, UnexpandedPrompt
from medialane.vllm_bridge.engine_errors import mapped_errors
from model_parts import unexpanded_renderer

ITEM = MediaPayload("audio", "h", b"", (), MediaSize(), param="here", media_type="audio/wav")

_OURS = {"__name__": "medialane.somewhere"}
exec("def bug_of_ours(_): raise TypeError('a bug')", _OURS)


@pytest.fixture
def source():
    source = unexpanded_renderer(None, config=SimpleNamespace(multimodal_config=None))
    yield source
    source.close()


def raising(error):
    def load(_):
        raise error

    return load


@pytest.fixture
def decoding_by(source, monkeypatch):
    """Renders a prompt with an item in stage `url`, which vLLM's loader of audio decodes with `load`."""

    async def decode(load):
        monkeypatch.setattr(AudioMediaIO, "load_bytes", lambda _, data: load(data))
        with mapped_errors():
            return await rendered(source, "url")

    return decode


async def rendered(source, stage):
    prompt = UnexpandedPrompt([1], (ITEM,), stage=stage)
    request = EngineRequest("r", prompt, sampling_params=msgspec.msgpack.encode({}))
    return await source.render(request, prompt, [[memoryview(b"bytes")]])


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES.values() if not stage.is_processed])
async def test_worker_implements_every_stage_left_to_it(source, stage):
    with pytest.raises((InvalidAudio, InvalidFeature)):  # these bytes are no audio in any of them
        await rendered(source, stage)


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), RuntimeError("bad"), AttributeError("bad"), OSError("truncated"), KeyError("bad")],
    ids=repr,
)
async def test_what_decoders_raise_for_bytes_is_the_clients(decoding_by, error):
    with pytest.raises(InvalidAudio) as raised:
        await decoding_by(raising(error))
    assert raised.value.param == "here"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineDeadError(), WorkerLost),
        (MemoryError(), Unavailable),
        (torch.OutOfMemoryError("CUDA out of memory"), Unavailable),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Unavailable),
        (OSError(errno.EMFILE, "too many open files"), Unavailable),
        (GracefulHTTPError("queue is full", HTTPStatus.SERVICE_UNAVAILABLE), Unavailable),
        (ModuleNotFoundError("No module named 'av'"), UnsupportedMediaType),
    ],
    ids=repr,
)
async def test_failure_of_the_worker_is_not_the_clients(decoding_by, error, expected):
    with pytest.raises(expected):
        await decoding_by(raising(error))


async def test_bug_of_ours_is_not_the_clients(decoding_by):
    with pytest.raises(TypeError, match="a bug"):
        await decoding_by(_OURS["bug_of_ours"])


async def test_executor_that_is_closed_is_not_the_clients(source, decoding_by):
    source.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await decoding_by(len)


class FailingRenderer:
    def __init__(self, error):
        self._error = error

    async def render_cmpl_async(self, _):
        raise ValueError("Failed to apply the processor on data={'audio': [array([1, 2])]}") from self._error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TypeError("bad"), PromptRejected),
        (None, PromptRejected),
        (MemoryError(), Unavailable),
        (EngineDeadError(), WorkerLost),
        (OSError(errno.ENOSPC, "no space left"), Unavailable),
    ],
    ids=repr,
)
async def test_cause_of_a_failed_processor_decides_whose_fault_it_is(error, expected):
    source = unexpanded_renderer(FailingRenderer(error), config=SimpleNamespace(multimodal_config=None))
    prompt = UnexpandedPrompt([1], (), stage="decoded")
    request = EngineRequest("r", prompt, sampling_params=msgspec.msgpack.encode({}))
    with pytest.raises(expected), mapped_errors():
        await source.render(request, prompt, [])
    source.close()
