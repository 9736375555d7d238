"""Traces: times, lengths and what prompts have in common, without text. Prompts are made up to match.

* *Mooncake* (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): `timestamp` in ms, `input_length`,
  `output_length`, `hash_ids` of blocks of 512 tokens; equal ids are equal blocks after equal blocks.
* *Qwen-Bailian* (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon): the same with `chat_id`, `timestamp`
  in seconds, blocks of 16 tokens.
* *ServeGen, offline traces* (https://github.com/alibaba/ServeGen, data/offline/README.md): `request_id`, `type`, no
  times; blocks of 16 tokens and `img_ids`, or `output_length` alone.
* *ServeGen, generated workloads* as CSV: the columns of its `Request` (servegen/construct.py): `request_id`,
  `timestamp` in seconds, `input_tokens` or `text_tokens`, `output_tokens`, lists in `image_tokens`, `audio_tokens`,
  `video_tokens`.
* *BurstGPT* (https://github.com/HPMLL/BurstGPT) as CSV: `Timestamp` in seconds, `Request tokens`, `Response tokens`.
  vLLM's benchmark reads it, too (`--dataset-name burstgpt`).

Text prompts are token ids, which are exact; they are among those that every vocabulary has. Prompts with images are
words, of about a token each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from medialane.compare.asked import CHAT, COMPLETIONS
from medialane.compare.formats.line_format import Line, LineFormat, Sources, count_in, number_in
from medialane.compare.traffic import Ask, UnusableLine
from medialane.core.hashing import content_hash
from medialane.gateway.recording import StandIn

#: In the vocabulary of any model, and no special tokens.
_TOKENS = range(100, 1000)
_WORDS = (
    "the", "sea", "was", "calm", "and", "a", "boat", "lay", "by", "the", "old", "stone", "wall", "in", "sun", "as",
    "we",
)  # fmt: skip
#: ServeGen's traces of hashes do not have the length of the answer.
_UNKNOWN_OUTPUT = 64
#: Of an image of a trace that has no size: that of a photo for a chat.
_IMAGE_SIZE = (1024, 768)
#: Pixels that Qwen2.5-VL and its like make one token of.
_PIXELS_PER_TOKEN = 28 * 28
_MOST_TOKENS_OF_IMAGE = 16384


def _hashed(block_size: int, line: Line, _sources: Sources) -> Ask:
    return _tokens(_prompt(line, block_size), count_in(line, "output_length"))


def _offline(line: Line, sources: Sources) -> Ask:
    num_output = count_in(line, "output_length") if "output_length" in line else _UNKNOWN_OUTPUT
    images = line.get("img_ids") or []
    if not images:
        return _tokens(_prompt(line, 16), num_output)
    made = [StandIn("image", content_hash(str(image).encode())[:16], *_IMAGE_SIZE) for image in images]
    seeds = line.get("hash_ids") or [f"{line.get('request_id')}"]
    return _chat(
        [sources.stand_ins.url(each) for each in made], _words(seeds, count_in(line, "input_length")), num_output
    )


def _servegen(line: Line, sources: Sources) -> Ask:
    num_input, num_output = count_in(line, "input_tokens", "text_tokens"), count_in(line, "output_tokens")
    name = f"{line.get('request_id', '')}:{line.get('timestamp', '')}"
    images = [_image(f"{name}:{n}", tokens) for n, tokens in enumerate(_list(line, "image_tokens"))]
    if images:
        return _chat([sources.stand_ins.url(each) for each in images], _words([name], num_input), num_output)
    return _tokens(_block(name, num_input), num_output)


def _burst(line: Line, _sources: Sources) -> Ask:
    name = f"{line.get('Timestamp')}:{line.get('Session ID', '')}:{line.get('Request tokens')}"
    return _tokens(_block(name, count_in(line, "Request tokens")), count_in(line, "Response tokens"))


def _prompt(line: Line, block_size: int) -> list[int]:
    """Return token ids of the line's length, block by block from its hashes; what is beyond them is its own."""
    length, hashes = count_in(line, "input_length"), line.get("hash_ids") or []
    if not isinstance(hashes, list):
        raise UnusableLine("hash_ids is not a list")
    prompt = [token for each in hashes for token in _block(each, block_size)][:length]
    own = json.dumps([line.get(name) for name in ("request_id", "timestamp", "input_length", "hash_ids")])
    return [*prompt, *_block(own, length - len(prompt))]


def _block(seed: Any, size: int) -> list[int]:
    return Random(str(seed)).choices(_TOKENS, k=max(0, size))  # noqa: S311 - the same in each run


def _tokens(prompt: list[int], num_output: int) -> Ask:
    if not prompt:
        raise UnusableLine("its prompt is empty")
    return Ask(COMPLETIONS, {"prompt": prompt, **_exactly(num_output)})


def _chat(urls: Sequence[str], words: str, num_output: int) -> Ask:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": words}]
    return Ask(CHAT, {"messages": [{"role": "user", "content": content}], **_exactly(num_output)})


def _words(seeds: Sequence[Any], count: int) -> str:
    """Return so many words, those of each seed in turn: equal seeds are equal words."""
    share = -(-count // len(seeds)) or 1
    words = [word for seed in seeds for word in Random(str(seed)).choices(_WORDS, k=share)]  # noqa: S311
    return " ".join(words[:count]) or "?"


def _exactly(num_output: int) -> dict[str, Any]:
    return {"max_tokens": max(1, num_output), "ignore_eos": True}


def _image(name: str, num_tokens: int) -> StandIn:
    """Return a square image that becomes about so many tokens."""
    side = max(28, 28 * round(math.sqrt(min(num_tokens, _MOST_TOKENS_OF_IMAGE) * _PIXELS_PER_TOKEN) / 28))
    return StandIn("image", content_hash(name.encode())[:16], side, side)


def _list(line: Line, name: str) -> list[int]:
    value = line.get(name) or []
    try:
        found = json.loads(value) if isinstance(value, str) else value
        return [int(each) for each in found]
    except (ValueError, TypeError):
        raise UnusableLine(f"{name} is not a list of numbers") from None


def _milliseconds(line: Line) -> float | None:
    return number_in(line, "timestamp") / 1000


def _seconds(line: Line) -> float | None:
    return number_in(line, "timestamp", "Timestamp", "start_time")


_MADE_UP = "prompts are made up: token ids of the same lengths, equal where the trace says so"
_WITH_IMAGES = f"{_MADE_UP}; beside images they are words; images are made up, too, audio and video left out"

TRACES = (
    LineFormat(
        "Qwen-Bailian trace",
        lambda line: "input_length" in line and "chat_id" in line,
        partial(_hashed, 16),
        seconds=_seconds,
        note=_MADE_UP,
    ),
    LineFormat(
        "ServeGen offline trace",
        lambda line: "input_length" in line and "request_id" in line and "timestamp" not in line,
        _offline,
        id_of=lambda line: str(line["request_id"]),
        note=_WITH_IMAGES,
    ),
    LineFormat(
        "Mooncake trace",
        lambda line: "input_length" in line and "timestamp" in line,
        partial(_hashed, 512),
        seconds=_milliseconds,
        note=_MADE_UP,
    ),
    LineFormat(
        "ServeGen workload",
        lambda line: "output_tokens" in line and ("input_tokens" in line or "text_tokens" in line),
        _servegen,
        seconds=_seconds,
        id_of=lambda line: str(line.get("request_id", "")),
        note=_WITH_IMAGES,
    ),
    LineFormat("BurstGPT trace", lambda line: "Request tokens" in line, _burst, seconds=_seconds, note=_MADE_UP),
)
