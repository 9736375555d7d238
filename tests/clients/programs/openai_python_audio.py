"""OpenAI's client for Python, for a model that hears, behind a key."""

from __future__ import annotations

import io
from typing import Any

from openai import OpenAI
from openai_client import asked, chat, client, describe, dumped, image, server
from recorded import Calls, stream

calls = Calls(describe)


def transcribe(file: Any = server.clip, **options: Any) -> Any:
    """A transcription, or its events."""
    made = client.audio.transcriptions.create(
        **{"model": server.model, "file": file, "language": "en", "temperature": 0, **options}
    )
    if isinstance(made, str):
        return made
    return stream(map(dumped, made)) if options.get("stream") else dumped(made)


def clip() -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": server.clip_base64(), "format": "wav"}}


@calls
def transcription() -> Any:
    return transcribe()


@calls
def transcription_of_bytes() -> Any:
    return transcribe(("speech.wav", io.BytesIO(server.clip.read_bytes()), "audio/wav"))


@calls
def transcription_as_text() -> Any:
    return transcribe(response_format="text")


@calls
def transcription_with_segments() -> Any:
    return transcribe(response_format="verbose_json", timestamp_granularities=["segment"])


@calls
def stream_of_a_transcription() -> Any:
    return transcribe(stream=True)


@calls
def translation() -> Any:
    return dumped(client.audio.translations.create(model=server.model, file=server.clip, temperature=0))


@calls
def audio_in_a_chat() -> Any:
    return chat(clip())


@calls
def stream_of_a_chat_with_audio() -> Any:
    return chat(clip(), stream=True)


@calls
def broken_audio() -> Any:
    transcribe(("speech.wav", server.clip.read_bytes()[:40], "audio/wav"))


@calls
def unknown_model() -> Any:
    transcribe(model="no-such-model")


@calls
def unknown_language() -> Any:
    transcribe(language="xx")


@calls
def image_for_a_model_that_hears() -> Any:
    chat(image(server.data_url()))


def with_key(key: str) -> Any:
    other = OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)
    return dumped(other.chat.completions.create(model=server.model, messages=asked(), max_tokens=1, temperature=0))


@calls
def right_key() -> Any:
    return with_key(server.key)


@calls
def wrong_key() -> Any:
    with_key("guessed")


@calls
def wrong_key_for_an_upload() -> Any:
    OpenAI(base_url=f"{server.base_url}/v1", api_key="guessed", max_retries=0).audio.transcriptions.create(
        model=server.model, file=server.clip
    )


@calls
def wrong_key_for_models() -> Any:
    OpenAI(base_url=f"{server.base_url}/v1", api_key="guessed", max_retries=0).models.list()


if __name__ == "__main__":
    calls.print_all()
