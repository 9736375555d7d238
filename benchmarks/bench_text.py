"""Text through medialane with one worker and its rivals: plain vLLM, and vLLM with its Rust front end, each server with
its defaults (`servers`), alternating in one run.

Closed loops of prompts that no cache knows, and chats: each request has the whole conversation so far, of which a
server has cached all but the last answer and question. The client of the loops is `vllm-rs bench serve`, if there is
one: it takes less of the cores than a client in Python.

The servers alternate in each case, A B C, C B A, ...; a figure is the median over the rounds, a ratio the median of the
rounds' ratios. CPU time is that of all of a server's processes, busy-waiting included; the front is vLLM's API server,
`vllm-rs` or the gateway.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from conversations import Question, Shape, hold, questions
from harness import Bar, Options, Report, median, percentile
from load import Answered, cpu_seconds, random_text, send, send_by_rust, text_request
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from peers import RUST, SHORT_NAMES, rivals, rust_front_end
from servers import OURS, PLAIN, Server, settle

ABOUT = "text through medialane, plain vLLM and vLLM's Rust front end: TTFT, requests/s, inter-token time, CPU, chats"

#: Of repeated flags the last one counts.
FLAGS = (*TINY_MODEL_FLAGS, "--max-model-len=16384")
SHORT, LONG = "60 words", "8k tokens"
_NUM_WORDS = {SHORT: 60, LONG: 5000}
#: By prompt and number of clients. 32 clients with long prompts would wait for the engine alone, 3 s for each request.
_NUM_REQUESTS = {(SHORT, 1): 40, (SHORT, 8): 120, (SHORT, 32): 320, (LONG, 1): 2, (LONG, 8): 8}
CHAT, SESSION = "chat", "session"
#: Conversations, of 6,500 tokens at the end, and 23 kB, or 10,000 tokens; and how many are held at once.
SHAPES = {
    CHAT: Shape(num_users=6, num_turns=12, num_images=0, num_words=310),
    SESSION: Shape(num_users=10, num_turns=20, num_images=0, num_words=285),
}
CONVERSATIONS = ((CHAT, 1), (CHAT, 6), (SESSION, 10))
_CHAT_TOKENS = 16
#: Targets are about the short prompts with these many tokens (requests/s: and clients), and the later half of the turns
#: of a conversation.
_JUDGED_TOKENS, _JUDGED_CLIENTS = 64, 32
#: By the number of clients.
_MAX_TTFT = {PLAIN: {1: 1.1, 8: 1.15, 32: 1.15}, RUST: dict.fromkeys((1, 8, 32), 1.6)}
_MIN_REQUESTS = {PLAIN: 1.1, RUST: 0.85}
_MAX_CHAT_TTFT = {CHAT: 0.97, SESSION: 1.0}

#: Parts of the command lines of processes, by what their CPU time is called.
_GROUPS = {
    "front": ("medialane gateway", "vllm-rs frontend", "vllm.entrypoints.openai.api_server"),
    "worker": ("medialane worker",),
    "engine": ("VLLM::",),
}
_OTHERS = "others"

#: Of texts and of conversations: none is used twice in a run.
_SEEDS, _CHAT_SEEDS = count(1000), count(1000)

#: Of one server in one round, by column.
Figures = dict[str, float]


@dataclass(frozen=True)
class Setup:
    """What is compared, and the program `vllm-rs`, if there is one."""

    model: str
    servers: tuple[Server, ...]
    rust: Path | None
    options: Options


@dataclass(frozen=True)
class Case:
    """Requests of this many tokens, with a new prompt each."""

    prompt: str
    num_tokens: int
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.prompt}, {self.num_tokens} tokens, c={self.concurrency}"

    def texts(self, *, quick: bool) -> list[str]:
        num = _NUM_REQUESTS[self.prompt, self.concurrency] // (2 if quick else 1)
        return [random_text(next(_SEEDS), _NUM_WORDS[self.prompt]) for _ in range(num)]


CASES = [Case(prompt, num_tokens, clients) for num_tokens in (1, _JUDGED_TOKENS) for prompt, clients in _NUM_REQUESTS]


def run(options: Options) -> Report:
    report = Report("text")
    return asyncio.run(_run(options, report, rust_front_end(report)))


async def _run(options: Options, report: Report, rust: Path | None) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    async with rivals(model, rust, flags=FLAGS) as servers:
        setup = Setup(model, servers, rust, options)
        for server in servers:
            await _send(setup, CASES[-1], CASES[-1].texts(quick=True), server)  # not counted
        for case in CASES:
            await _measure_loop(report, case, setup)
        for kind, num_users in CONVERSATIONS:
            await _measure_chat(report, kind, num_users, setup)
    return report


async def _measure_loop(report: Report, case: Case, setup: Setup) -> None:
    found = await _rounds(setup, lambda: partial(_loop, setup, case, case.texts(quick=setup.options.quick)))
    report.tables.setdefault(f"{case.num_tokens} tokens", []).extend(_rows(case.name, found))
    if case.prompt != SHORT or case.num_tokens != _JUDGED_TOKENS:
        return
    for peer in [server.name for server in setup.servers if server.name != OURS]:
        ttft, limit = _ratio(found, peer, "ttft_p50_ms"), _MAX_TTFT[peer][case.concurrency]
        report.bars.append(Bar(f"{case.name}: TTFT p50 / {SHORT_NAMES[peer]}", ttft, limit, "at most"))
        if case.concurrency == _JUDGED_CLIENTS:
            per_s = _ratio(found, peer, "req/s")
            report.bars.append(Bar(f"{case.name}: req/s / {SHORT_NAMES[peer]}", per_s, _MIN_REQUESTS[peer], "at least"))


async def _measure_chat(report: Report, kind: str, num_users: int, setup: Setup) -> None:
    found = await _rounds(setup, lambda: partial(_chat, setup, questions(SHAPES[kind], next(_CHAT_SEEDS))[:num_users]))
    name = f"{kind}, users={num_users}"
    report.tables.setdefault("chat", []).extend(_rows(name, found))
    ratio = _ratio(found, PLAIN, "ttft_p50_ms")
    report.bars.append(Bar(f"{name}: TTFT p50 / {SHORT_NAMES[PLAIN]}", ratio, _MAX_CHAT_TTFT[kind], "at most"))


async def _rounds(
    setup: Setup, new_round: Callable[[], Callable[[Server], Awaitable[Figures]]]
) -> dict[str, list[Figures]]:
    """Return what each server has done in each round. All get the same, one after the other, the others being idle."""
    found: dict[str, list[Figures]] = {server.name: [] for server in setup.servers}
    for number in range(setup.options.rounds or (1 if setup.options.quick else 5)):
        measure = new_round()
        for server in setup.servers if number % 2 == 0 else setup.servers[::-1]:
            await settle()
            found[server.name].append(await measure(server))
    return found


async def _loop(setup: Setup, case: Case, texts: Sequence[str], server: Server) -> Figures:
    before = _cpu_s(server)
    answered = await _send(setup, case, texts, server)
    return {
        "req/s": answered.requests_per_s,
        **_ttft_ms(answered.ttft_s),
        **({"inter_token_p50_ms": 1000 * median(answered.gaps_s)} if case.num_tokens > 1 else {}),
        **_cpu_ms(server, before, len(texts)),
    }


async def _send(setup: Setup, case: Case, texts: Sequence[str], server: Server) -> Answered:
    url, num_tokens, concurrency, pids = server.base_url, case.num_tokens, case.concurrency, server.pids
    if setup.rust is None:
        bodies = [text_request(setup.model, text, num_tokens=num_tokens) for text in texts]
        return await send(url, bodies, concurrency=concurrency, pids=pids)
    return await asyncio.to_thread(
        send_by_rust,
        setup.rust,
        url,
        texts,
        model=setup.model,
        num_tokens=num_tokens,
        concurrency=concurrency,
        pids=pids,
    )


async def _chat(setup: Setup, asked: list[list[Question]], server: Server) -> Figures:
    before = _cpu_s(server)
    held = await hold([server.base_url], setup.model, asked, num_tokens=_CHAT_TOKENS, pids=server.pids)
    return {
        "req/s": held.num_requests / held.wall_s,
        **_ttft_ms(held.ttft_s(lambda turn: turn >= len(asked[0]) // 2)),
        **_cpu_ms(server, before, held.num_requests),
    }


def _ttft_ms(ttft_s: Sequence[float]) -> Figures:
    return {"ttft_p50_ms": 1000 * median(ttft_s), "ttft_p99_ms": 1000 * percentile(ttft_s, 0.99)}


def _cpu_s(server: Server) -> dict[str, float]:
    """Return the CPU time that the server's processes have used so far, by group."""
    used = dict.fromkeys([*_GROUPS, _OTHERS], 0.0)
    for pid in server.pids():
        used[_group(pid)] += cpu_seconds([pid])
    return used


def _group(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return _OTHERS  # it has exited
    return next((name for name, parts in _GROUPS.items() if any(part in command for part in parts)), _OTHERS)


def _cpu_ms(server: Server, before: dict[str, float], num_requests: int) -> Figures:
    return {f"{name}_cpu_ms": 1000 * (used - before[name]) / num_requests for name, used in _cpu_s(server).items()}


def _rows(case: str, found: dict[str, list[Figures]]) -> list[dict[str, object]]:
    return [
        {"case": case, "server": name, **{key: median(each[key] for each in rounds) for key in rounds[0]}}
        for name, rounds in found.items()
    ]


def _ratio(found: dict[str, list[Figures]], peer: str, key: str) -> float:
    return median(ours[key] / theirs[key] for ours, theirs in zip(found[OURS], found[peer], strict=True))
