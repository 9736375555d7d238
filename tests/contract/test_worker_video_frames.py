"""A worker decodes no more frames of a video than the operator allows, whatever options a request has (stage `url`)."""

from types import SimpleNamespace

import pytest

from medialane.types.errors import TooManyFrames
from medialane.types.feature import MediaPayload
from medialane.types.hashing import canonical_options
from medialane.types.media import MediaSize
from medialane.types.request import EngineRequest, UnexpandedPrompt
from medialane.vllm_bridge.seams import multimodal
from model_parts import unexpanded_renderer
from video_clips import clip

MOST = 16


class Renderer:
    """Keeps the media that a worker has loaded, without a model."""

    async def render_cmpl_async(self, prompts):
        self.media = prompts[0]["multi_modal_data"]
        return [{"type": "multimodal", "prompt_token_ids": [1], "mm_hashes": prompts[0]["multi_modal_uuids"]}]


@pytest.fixture
def load(monkeypatch):
    """Decode a clip of so many frames with a request's options, as a worker's loader of this name."""
    monkeypatch.setattr(multimodal.opencv, "decode_opencv", multimodal.vllm_decode)
    multimodal.limit_sampled_frames(MOST)
    renderer = Renderer()
    source = unexpanded_renderer(renderer, config=SimpleNamespace(multimodal_config=None))

    async def decode(total, backend, **options):
        monkeypatch.setattr("medialane.vllm_bridge.engine.unexpanded_prompt.video_backend", lambda _config: backend)
        item = MediaPayload("video", "h", b"", (), MediaSize(), io=canonical_options(options), param="here")
        prompt = UnexpandedPrompt([1], (item,), stage="url")
        await source.render(EngineRequest("r", prompt, b""), prompt, [[memoryview(clip(total))]])
        (found,) = renderer.media["video"]
        return len(found[0] if isinstance(found, tuple) else found.media[0])

    yield decode
    source.close()


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("opencv", {"num_frames": -1}),
        ("opencv", {"num_frames": 1 << 31}),
        ("opencv", {"num_frames": -1, "fps": 240.0}),
        ("qwen2_vl", {"fps": 240.0, "max_frames": 1 << 31, "num_frames": -1}),
    ],
    ids=str,
)
async def test_more_frames_than_allowed_are_rejected_before_one_is_decoded(load, monkeypatch, backend, options):
    assert await load(MOST - 4, backend, **options) <= MOST
    reads = []
    monkeypatch.setattr(multimodal.VideoLoader, "read_frames", classmethod(lambda *args, **_: reads.append(args)))
    with pytest.raises(TooManyFrames) as error:
        await load(3 * MOST, backend, **options)
    assert (error.value.status, error.value.param, reads) == (400, "here", [])
