"""Rendering and tokenizing of a turn behind 100 kB of chat history: the gateway's renderer with cached segments, and
vLLM's alone.

The tokenizer has 100,000 merges, trained on this machine (`large_vocabulary`). Both are vLLM's renderer over the same
model, called as its server does, in turns, A B B A ...; a turn has a new answer and a new question. `CPU` is that of
the whole process; a figure is the median over the turns of all rounds, a ratio that of the medians. Token ids must be
equal.

Cases: messages of 2.5 kB; one document of 100 kB in the first message; first turns, of which nothing is known.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams, TokenizeParams

from harness import Bar, Options, Report, median
from large_vocabulary import large_vocabulary_model, sources, vocabulary
from medialane.gateway import GatewayConfig
from medialane.testing.tiny_model import TINY_MODEL_FLAGS
from medialane.vllm_bridge.frontend import install_segment_cache, splitter_of, take_frontend

ABOUT = "rendering and tokenizing of a turn behind 100 kB of chat history, with and without cached segments"

ROUNDS, QUICK_ROUNDS = 5, 1
NUM_TURNS = 8
HISTORY_BYTES = 100_000
MAX_TOKENS = 65_536
PLAIN, CACHED = "vLLM", "medialane"


def run(options: Options) -> Report:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a gateway
    return asyncio.run(_run(options))


#: Wall and CPU seconds, and CPU seconds of the template alone.
Spent = tuple[float, float, float]


@dataclass
class Case:
    """A chat of `message_bytes` a message, and the most CPU time of its turns, vLLM = 1. `is_known`: all but the turn's
    last two messages was rendered before."""

    name: str
    limit: float
    message_bytes: int = 2500
    is_known: bool = True
    spent: dict[str, list[Spent]] = field(default_factory=lambda: {PLAIN: [], CACHED: []})
    num_tokens: int = 0
    num_bytes: int = 0


async def _run(options: Options) -> Report:
    report = Report("tokenize")
    flags = [flag for flag in TINY_MODEL_FLAGS if "max-model-len" not in flag]
    plain = take_frontend(str(large_vocabulary_model()), [*flags, f"--max-model-len={MAX_TOKENS}"]).renderer
    renderers = {PLAIN: plain, CACHED: renderer_from_config(plain.config)}
    splitter = splitter_of(plain.tokenizer)
    words = _words(random.Random(1))
    cases = [
        Case("messages of 2.5 kB", 0.1),
        Case("a document of 100 kB", 0.1, message_bytes=HISTORY_BYTES),
        Case("first turn, messages", 1.1, is_known=False),
    ]
    for _ in range(options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)):
        for case in cases:
            backend: Any = SimpleNamespace(salt="")
            cache = install_segment_cache(renderers[CACHED], backend, splitter, GatewayConfig().token_cache_bytes)
            if cache is None:
                raise AssertionError("the tokenizer's texts are not cut")
            await _chat(case, renderers, words)
            case.num_bytes = cache.stats.num_bytes
    for case in cases:
        report.bars.append(Bar(f"{case.name}: CPU of a turn, vLLM = 1", *_figures(case, report), "at most"))
    for renderer in renderers.values():
        renderer.shutdown()
    return report


async def _chat(case: Case, renderers: Mapping[str, Any], words: Iterator[str]) -> None:
    num = HISTORY_BYTES // case.message_bytes
    chat = [_message(words, ("user", "assistant")[number % 2], case.message_bytes) for number in range(num)]
    chat.append(_message(words, ("user", "assistant")[num % 2], 500))
    for renderer in renderers.values():
        await _rendered(renderer, chat if case.is_known else [_message(words, "user", 2000)])
    for turn in range(NUM_TURNS if case.is_known else 1):
        chat += [_message(words, "assistant", 1500), _message(words, "user", 500)]
        found = {}
        for name in list(renderers)[:: 1 if turn % 2 else -1]:
            found[name], spent = await _rendered(renderers[name], chat)
            case.spent[name].append(spent)
        if found[PLAIN] != found[CACHED]:
            raise AssertionError(f"{case.name}: other ids than vLLM's")
        case.num_tokens = len(found[PLAIN])


def _figures(case: Case, report: Report) -> tuple[float, float]:
    """Add the rows of a case, and return its ratio and limit."""
    medians = {name: [median(values) for values in zip(*spent, strict=True)] for name, spent in case.spent.items()}
    for name, (wall_s, cpu_s, template_s) in medians.items():
        row: dict[str, object] = {"case": case.name, "renderer": name, "tokens": case.num_tokens}
        row |= {"wall ms": 1000 * wall_s, "CPU ms": 1000 * cpu_s, "of it template": 1000 * template_s}
        row |= {"cache MB": case.num_bytes / 1e6 if name == CACHED else 0.0}
        report.tables.setdefault("turns", []).append(row)
    return medians[CACHED][1] / medians[PLAIN][1], case.limit


async def _rendered(renderer: Any, chat: list[dict[str, str]]) -> tuple[list[int], Spent]:
    template = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    started, cpu = time.perf_counter(), time.process_time()
    _, dict_prompt = await renderer.render_messages_async(chat, template)
    rendered = time.process_time()
    limits = TokenizeParams(max_total_tokens=MAX_TOKENS, max_output_tokens=100, add_special_tokens=False)
    (prompt,) = await renderer.tokenize_prompts_async([dict_prompt], limits)
    spent = time.perf_counter() - started, time.process_time() - cpu, rendered - cpu
    return prompt["prompt_token_ids"], spent


def _message(words: Iterator[str], role: str, num_bytes: int) -> dict[str, str]:
    parts, size = [], 0
    while size < num_bytes:
        parts.append(next(words))
        size += len(parts[-1].encode())
    return {"role": role, "content": "".join(parts)}


def _words(chosen: random.Random) -> Iterator[str]:
    """Yield half lines of code, half words of several scripts, with punctuation."""
    lines = "".join(sources(2_000_000)).splitlines(keepends=True)
    names = vocabulary(random.Random(0))
    while True:
        yield chosen.choice(lines)
        for _ in range(6):
            yield names[int(len(names) * chosen.random() ** 3)] + chosen.choice((" ", " ", " ", ", ", ".\n"))
