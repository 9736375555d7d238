"""Transcription and translation of uploads: formats, languages, long audio, streams and refusals."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from medialane.tools.check.case import Answer, Case, CaseRequest, EndpointKind, Limits, Upload, whole_document
from medialane.tools.check.media import audio

#: Several clips: vLLM cuts most models' audio after 30 s.
_LONG_S = 75

#: More than vLLM's limits: VLLM_MAX_AUDIO_CLIP_FILESIZE_MB, VLLM_MAX_AUDIO_DECODE_DURATION_S.
_LARGE_BYTES = 26 << 20
_TOO_LONG_S = 601


def _clip(pitch_hz: int, seconds: float = 1.5, **form: Any) -> bytes:
    """Return the file in `audio`'s data: URL."""
    url = audio(pitch_hz, seconds, **form)["audio_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


def _upload(path: str, data: Callable[[], bytes] | None, **fields: str) -> CaseRequest:
    """Return an upload of at most 40 tokens: random weights would go on to the longest answer."""
    settings = {"temperature": "0", "max_completion_tokens": "40", **fields}
    files = () if data is None else (("file", Upload("speech", data(), "application/octet-stream")),)
    return CaseRequest(path, form=(*settings.items(), *files))


def _cases(path: str, _limits: Limits) -> Iterator[Case]:
    one, other, long = partial(_clip, 440), partial(_clip, 900, 2.3), partial(_clip, 330, _LONG_S)
    verbose = {"response_format": "verbose_json"}
    yield Case("one clip", partial(_upload, path, one, language="en"), is_essential=True)
    yield Case("another clip", partial(_upload, path, other, language="en"), varies="one clip", is_essential=True)
    yield Case("the same clip again", partial(_upload, path, one, language="en"), is_essential=True)
    yield Case("language detected", partial(_upload, path, one), is_essential=True)
    yield Case("another language", partial(_upload, path, one, language="de"))
    yield Case("segments", partial(_upload, path, other, language="en", **verbose), is_essential=True)
    yield Case("segments, language detected", partial(_upload, path, one, **verbose))
    yield Case("text", partial(_upload, path, one, language="en", response_format="text"))
    yield Case("subtitles", partial(_upload, path, one, language="en", response_format="srt"), is_essential=True)
    yield Case("with a prompt", partial(_upload, path, one, language="en", prompt="boats"))
    yield Case("streaming", partial(_upload, path, other, language="en", stream="true"), is_essential=True)
    yield Case(
        "streaming, usage",
        partial(_upload, path, one, stream="true", stream_include_usage="true", language="en"),
    )
    yield Case(f"{_LONG_S} s", partial(_upload, path, long, language="en"), is_essential=True)
    yield Case(f"{_LONG_S} s, segments", partial(_upload, path, long, language="en", **verbose), is_essential=True)
    yield Case(f"{_LONG_S} s, streaming", partial(_upload, path, long, language="en", stream="true"))
    yield Case("0.1 s", partial(_upload, path, partial(_clip, 700, 0.1), language="en"))
    stereo = partial(_clip, 620, 2.3, rate=44100, channels=2)
    yield Case("44.1 kHz stereo", partial(_upload, path, stereo, language="en"), is_essential=True)
    flac = partial(_clip, 250, 2, rate=8000, container="FLAC")
    yield Case("8 kHz FLAC", partial(_upload, path, flac, language="en"))
    for container in ("MP3", "OGG"):
        yield Case(
            container, partial(_upload, path, partial(_clip, 280, 2, rate=44100, container=container), language="en")
        )
    yield from _fields(path, one)
    yield from _refused(path, one)


def _fields(path: str, one: Callable[[], bytes]) -> Iterator[Case]:
    """Yield cases of the form's other fields."""
    for name, fields in {
        "beam search": {"use_beam_search": "true", "n": "2"},
        "sampled with a seed": {"temperature": "0.8", "seed": "7", "top_p": "0.9", "top_k": "20"},
        "penalties": {"frequency_penalty": "0.5", "presence_penalty": "0.5", "repetition_penalty": "1.2"},
        "into another language": {"to_language": "fr"},
        "hotwords": {"hotwords": "boats, harbour"},
        "words and segments": {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        "WebVTT": {"response_format": "vtt"},
        "speakers": {"response_format": "diarized_json"},
        "streaming, usage of each piece": {
            "stream": "true",
            "stream_include_usage": "true",
            "stream_continuous_usage_stats": "true",
        },
        "the only model": {"model": ""},
    }.items():
        yield Case(name, partial(_upload, path, one, **{"language": "en", **fields}))


def _refused(path: str, one: Callable[[], bytes]) -> Iterator[Case]:
    for name, fields in {
        "another model": {"model": "nobody/nothing"},
        "an unknown language": {"language": "xx"},
        "an unknown format": {"response_format": "xml"},
        "segments, streaming": {"response_format": "verbose_json", "stream": "true"},
        "beam search, streaming": {"use_beam_search": "true", "n": "2", "stream": "true"},
        "usage without a stream": {"stream_include_usage": "true"},
        "arguments that are not JSON": {"vllm_xargs": "{"},
        "a temperature below zero": {"temperature": "-1"},
        "no token": {"max_completion_tokens": "0"},
        "a prompt longer than the model's context": {"prompt": "word " * 100_000},
    }.items():
        is_essential = name in ("another model", "an unknown language")
        yield Case(name, partial(_upload, path, one, **{"language": "en", **fields}), is_essential=is_essential)
    yield Case("damaged", partial(_upload, path, lambda: one()[:40]), is_essential=True)
    yield Case("no file", partial(_upload, path, None), is_essential=True)
    yield Case("an empty file", partial(_upload, path, lambda: b"", language="en"), is_essential=True)
    yield Case("text instead of a file", partial(_upload, path, None, file="words", language="en"))
    yield Case("no audio", partial(_upload, path, lambda: b"words" * 1000, language="en"))
    yield Case("a file that is too large", partial(_upload, path, lambda: bytes(_LARGE_BYTES), language="en"))
    too_long = partial(_clip, 120, _TOO_LONG_S, rate=8000, container="FLAC")
    yield Case("audio that is too long", partial(_upload, path, too_long, language="en"))


def _compared(answer: Answer) -> Any:
    """Return the whole text of a stream: its pieces differ from server to server."""
    return _joined(answer.events) if answer.events else whole_document(answer)


def _joined(events: Iterable[Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {"text": "", "reasons": []}
    for event in events:
        joined |= {name: event[name] for name in ("error", "usage") if event.get(name) is not None}
        for choice in event.get("choices", ()):
            joined["text"] += choice["delta"].get("content") or ""
            joined["reasons"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return joined


SPEECH = tuple(
    EndpointKind(name, path, partial(_cases, path), compared=_compared)
    for name, path in {
        "transcription": "/v1/audio/transcriptions",
        "translation": "/v1/audio/translations",
    }.items()
)
