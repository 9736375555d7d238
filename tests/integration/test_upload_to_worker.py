"""An uploaded file, from the form to what reaches an engine: decoded by a preparer, its clips media like any others."""

from __future__ import annotations

import gc
from contextlib import aclosing

import numpy as np
import pytest
from gateway_parts import Parts

from audio_maker import by_libsndfile, tone, tones
from decoded_media import decode_audio
from medialane.gateway import GatewayConfig, open_scope, wave_bytes, wave_size
from medialane.gateway.intake import BodyMemory, BudgetCharge, ExtractedMedia, extract_files
from medialane.media import MediaConfig
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.types.errors import BodyMemoryExhausted, InvalidAudio, InvalidMediaUrl
from medialane.types.feature import MediaPrompt

RATE = 16000
TYPE = b"multipart/form-data; boundary=b"
FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


@pytest.fixture
def seen(worker):
    """Records the prompt of each request at the engine."""
    seen, generate = [], worker.engine.generate

    async def spied(request, tensors, embeddings):
        seen.append(request.prompt)
        async with aclosing(generate(request, tensors, embeddings)) as deltas:
            async for delta in deltas:
                yield delta

    worker.engine.generate = spied
    return seen


def uploaded(data, references):
    """What intake makes of a form with this file."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = head + data + b"\r\n--b--\r\n"
    config, limits = MediaConfig(), GatewayConfig()
    return ExtractedMedia(extract_files(body, TYPE, config, limits, references=references, size=len(body)).refs)


async def transcribe(parts, data, budget=None):
    """Send a file as a client does; this stands in for vLLM: it cuts the samples into two clips."""
    with open_scope() as scope:
        scope.extracted = uploaded(data, scope.references)
        scope.memory = BudgetCharge(budget or BodyMemory(1 << 30))
        scope.defer(scope.memory.release)
        wave = await parts.gateway.decode_audio(scope.references.text(0), RATE)
        samples = np.frombuffer(wave, np.float32, offset=wave_size(0))
        clips = [await parts.gateway.audio(clip, RATE) for clip in np.array_split(samples, 2)]
        for clip in clips:
            await parts.answer(MediaPrompt([1, PLACEHOLDER_TOKEN], (clip,)))
        return wave, scope.timeline.cache


@pytest.mark.parametrize("stage", ["decoded", "url"])
async def test_samples_are_those_of_the_decoder_at_the_models_rate(arena, preparers, worker, seen, stage):
    data = by_libsndfile(tones(44100, 2, 1.0), 44100, "MP3")
    expected = decode_audio(memoryview(data), MediaConfig(), sample_rate=RATE)
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage=stage, **FAST)) as parts:
        wave, _ = await transcribe(parts, data)
    assert wave == wave_bytes(expected.samples, RATE)
    assert len({prompt.media[0].mm_hash for prompt in seen}) == 2
    gc.collect()


async def test_same_file_again_is_neither_decoded_nor_processed(arena, preparers, worker, seen):
    async with Parts(arena, preparers, [worker], config=GatewayConfig(stage="decoded", **FAST)) as parts:
        assert (await transcribe(parts, tone(440)))[1] == "miss"
        num_jobs = preparers.stats().num_done
        assert (await transcribe(parts, tone(440)))[1] == "hit"
    assert num_jobs == preparers.stats().num_done == 3
    first, second = seen[:2], seen[2:]
    assert [p.media[0].mm_hash for p in first] == [p.media[0].mm_hash for p in second]


async def test_error_of_the_decoder_names_the_field(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with pytest.raises(InvalidAudio) as raised:
            await transcribe(parts, b"RIFF0000WAVEfmt " + bytes(100))
    assert raised.value.param == "file"


async def test_content_of_a_file_is_never_taken_for_a_reference(arena, preparers, worker):
    async with Parts(arena, preparers, [worker]) as parts:
        with open_scope() as scope, pytest.raises(InvalidMediaUrl):
            await parts.gateway.decode_audio(scope.references.text(0), RATE)


async def test_samples_are_charged_to_the_memory_for_bodies(arena, preparers, worker):
    data = tone(440, 3.0)
    budget = BodyMemory(wave_size(3 * RATE) + 1000)
    async with Parts(arena, preparers, [worker]) as parts:
        with pytest.raises(BodyMemoryExhausted):
            await transcribe(parts, data, budget)
    assert budget.num_bytes == 0
