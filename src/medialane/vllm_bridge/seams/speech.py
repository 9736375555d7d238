"""vLLM's handlers of uploaded speech."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

#: Returns the clips and the duration of an upload.
ToClips = Callable[[bytes], Awaitable[Any]]


def decode_speech_by(state: Any, wrap: Callable[[ToClips, float], ToClips]) -> None:
    """Replace, in the handlers of an app's speech endpoints, the step that decodes an upload and cuts it into clips by
    `wrap(step, sample_rate)`."""
    for serving in (state.openai_serving_transcription, state.openai_serving_translation):
        step = serving._decode_and_chunk_speech_async
        serving._decode_and_chunk_speech_async = wrap(step, serving.asr_config.sample_rate)
