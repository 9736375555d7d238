"""Datasets of `vllm bench serve` (vLLM 0.32, benchmarks/datasets/datasets.py), sent as chat completions.

* `custom`: JSONL with `prompt`, and `output_tokens` if the answers' length is to be that.
* `custom_image`: `prompt` with `image_files`, or `content` as parts of text, `image` and `image_url`.
* `custom_audio`: `prompt` with `audio`, a file.
* `sharegpt`: a JSON list of `conversations`; the first turn is the prompt, the second one's length that of the answer,
  with `image` (ShareGPT4V).

Files are read when their request is made, paths are relative to the dataset's folder.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from pybase64 import b64encode

from medialane.compare.asked import CHAT
from medialane.compare.formats.line_format import Line, LineFormat, Sources, count_in, text_in
from medialane.compare.traffic import Ask, UnusableLine

#: vLLM's default for datasets without a length (`--custom-output-len`).
_OUTPUT_TOKENS = 256
#: ShareGPT's answers are text; English has about so many characters for a token.
_CHARS_PER_TOKEN = 4
_REMOTE = ("http://", "https://", "data:")


def _custom(line: Line, sources: Sources) -> Ask:
    content = [_image(path, sources.folder) for path in line.get("image_files") or []]
    if "audio" in line:
        content.append({"type": "audio_url", "audio_url": {"url": _file_url(text_in(line, "audio"), sources.folder)}})
    return _chat([*content, _text(line.get("prompt") or "")], _length(line))


def _interleaved(line: Line, sources: Sources) -> Ask:
    content = line["content"]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UnusableLine("content is not a list of parts")
    return _chat([_part(part, sources.folder) for part in content], _length(line))


def _sharegpt(line: Line, sources: Sources) -> Ask:
    turns = line["conversations"]
    try:
        prompt, answer = str(turns[0]["value"]), str(turns[1]["value"])
    except (IndexError, KeyError, TypeError):
        raise UnusableLine("conversations has no two turns with a value") from None
    content = [_image(line["image"], sources.folder)] if line.get("image") else []
    return _chat([*content, _text(prompt)], max(1, len(answer) // _CHARS_PER_TOKEN))


def _chat(content: list[dict[str, Any]], num_output: int) -> Ask:
    return Ask(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": num_output})


def _length(line: Line) -> int:
    return count_in(line, "output_tokens") if line.get("output_tokens") not in (None, "") else _OUTPUT_TOKENS


def _part(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(words)}:
            return _text(words)
        case {"type": "image", "image": image}:
            return _image(image, folder)
        case {"type": "image_url", "image_url": {"url": str(url), **others}}:
            return {"type": "image_url", "image_url": {"url": _file_url(url, folder), **others}}
        case {"type": "image_url", "image_url": str(url)}:
            return _image(url, folder)
    raise UnusableLine(f"a part of type {str(part.get('type'))[:40]!r} is neither text nor an image")


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _image(path: object, folder: Path) -> dict[str, Any]:
    if not isinstance(path, str):
        raise UnusableLine("an image is not a path or a URL")
    return {"type": "image_url", "image_url": {"url": _file_url(path, folder)}}


def _file_url(path: str, folder: Path) -> str:
    """Return a URL that servers can read: of a file its content."""
    if path.startswith(_REMOTE):
        return path
    file = folder / path.removeprefix("file://")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UnusableLine(f"{file}: {error.strerror}") from error
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{b64encode(data).decode()}"


DATASETS = (
    LineFormat("vllm bench sharegpt", lambda line: "conversations" in line, _sharegpt),
    LineFormat("vllm bench custom_image", lambda line: isinstance(line.get("content"), list), _interleaved),
    LineFormat("vllm bench custom", lambda line: "prompt" in line, _custom),
)
