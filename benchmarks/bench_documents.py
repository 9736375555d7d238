"""A PDF in a request, beside plain vLLM that is sent the same pages as PNG, each server with its defaults (`servers`).

The client has rendered and compressed the pages before the time starts, at 144 dpi: it does not know how much of a page
the model uses (pdf2image's default is 200). medialane knows, and renders accordingly. Both prompts have no text of the
pages, and as many tokens. The servers alternate. A question about a new paper of ten pages, four more about the same
one, and eight users at once, each with a paper of their own, who ask five times: each request has the whole
conversation, as chat clients send it. A figure is the median over the rounds.

As operators do, the model is told to use less of a page than it has: each is 256 tokens, so that the prefill on two
cores, which is the same for both, does not take all the time.

That answers equal plain vLLM's about the same pixels is tried apart, with requests that name the client's resolution.

`pages` are counted by medialane: which are new, of another edition of a paper, for another user, and with salts.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import msgspec

from conversations import Held, Question, hold, share_of_same
from harness import Bar, Options, Report, median
from load import random_text
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from sample_documents import as_png, pages, paper, png
from servers import OURS, PLAIN, Server, both_servers, settle

ABOUT = "questions about a PDF, beside plain vLLM that is sent its pages as PNG: TTFT, CPU, bytes, requests/s"

NUM_PAGES, NUM_TURNS, NUM_USERS, NUM_TOKENS = 10, 5, 8, 4
#: The client's.
DPI = 144
#: Of repeated flags the last one counts. In bfloat16 an answer may depend on what else is in its batches.
FLAGS = (
    *TINY_MODEL_FLAGS,
    '--limit-mm-per-prompt={"image": 12, "video": 0}',
    '--mm-processor-kwargs={"max_pixels": 200704}',
    "--dtype=float32",
)
#: Of the costs of a page.
RESOLUTIONS = (72, 96, 144, 200)
#: Pixels of the side of a token of Qwen2.5-VL, of what its processor rounds a page to.
_TOKEN_SIDE = 28
_COUNTED_S = 30.0

#: No paper is sent twice in a run, unless that is measured.
_SEEDS = count(1)


@dataclass
class Rounds:
    """What a server has done, by round: a first turn, later ones, and users at once; bytes of a document in a body."""

    first: list[Held] = field(default_factory=list)
    later: list[Held] = field(default_factory=list)
    users: list[Held] = field(default_factory=list)
    num_bytes: int = 0


def run(options: Options) -> Report:
    report = Report("documents")
    report.tables["a page by dpi"] = [_cost(dpi, num_pages=2 if options.quick else NUM_PAGES) for dpi in RESOLUTIONS]
    return asyncio.run(_run(options, report))


async def _run(options: Options, report: Report) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    async with both_servers(model, flags=FLAGS, observed=options.observed) as servers:
        found = {server.name: Rounds() for server in servers}
        await _round(servers, model, {server.name: Rounds() for server in servers}, num_users=1)  # not counted
        for turn in range(options.rounds or (1 if options.quick else 5)):
            in_turn = servers if turn % 2 == 0 else servers[::-1]
            await _round(in_turn, model, found, num_users=2 if options.quick else NUM_USERS)
        report.tables["documents"] = [_row(name, rounds) for name, rounds in found.items()]
        report.bars += _bars(found[OURS], found[PLAIN])
        same = await _share_of_same(servers, model)
        report.bars.append(Bar(f"at {DPI} dpi: share of answers that equal plain's", same, 1.0, "at least"))
        (ours,) = (server for server in servers if server.name == OURS)
        counted = await _counted(ours, model)
    report.tables["pages"] = [{"request": name, **outcomes} for name, (outcomes, _) in counted.items()]
    for name, (outcomes, expected) in counted.items():
        report.bars.append(
            Bar(f"{name}: pages rendered, off {expected}", abs(outcomes["new"] - expected), 0, "at most")
        )
    return report


async def _round(servers: Sequence[Server], model: str, found: dict[str, Rounds], *, num_users: int) -> None:
    """Ask each idle server the same."""
    alone, users = paper(next(_SEEDS), NUM_PAGES), [paper(next(_SEEDS), NUM_PAGES) for _ in range(num_users)]
    for server in servers:
        as_sent = _file if server.name == OURS else _images
        own, *later = asked = _questions(as_sent(alone))
        all_asked = [_questions(as_sent(document)) for document in users]
        rounds, begun = found[server.name], list[list[object]]([[]])
        await settle()
        rounds.first.append(await _hold(server, model, [[own]], begun))
        rounds.later.append(await _hold(server, model, [later], begun))
        await settle()
        rounds.users.append(await _hold(server, model, all_asked, [[] for _ in users]))
        rounds.num_bytes = len(bytes(asked[0]))


async def _share_of_same(servers: Sequence[Server], model: str) -> float:
    """Return the share of equal answers to a conversation about the same pixels."""
    document = paper(next(_SEEDS), NUM_PAGES)
    held = []
    for server in servers:
        parts = _file(document, dpi=DPI) if server.name == OURS else _images(document)
        held.append(await _hold(server, model, [_questions(parts)], [[]]))
    return share_of_same(*held)


async def _hold(server: Server, model: str, asked: list[list[Question]], begun: list[list[object]]) -> Held:
    return await hold([server.base_url], model, asked, num_tokens=NUM_TOKENS, pids=server.pids, begun=begun)


def _file(document: bytes, **options: object) -> list[object]:
    """Return the parts of a message for medialane."""
    url = f"data:application/pdf;base64,{msgspec.json.encode(document)[1:-1].decode()}"
    return [{"type": "file", "file": {"file_data": url, "text": "none", **options}}]


def _images(document: bytes) -> list[object]:
    """Return the parts of a message for plain vLLM."""
    encoded = (msgspec.json.encode(image)[1:-1].decode() for image in as_png(document, DPI))
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in encoded]


def _questions(parts: list[object]) -> list[Question]:
    return [_message([*(parts if turn == 0 else []), _question(turn)]) for turn in range(NUM_TURNS)]


def _question(turn: int) -> object:
    return {"type": "text", "text": random_text(turn, 20)}


def _message(content: list[object]) -> Question:
    return msgspec.Raw(msgspec.json.encode({"role": "user", "content": content}))


def _row(name: str, rounds: Rounds) -> dict[str, object]:
    return {
        "server": name,
        "new_ttft_ms": 1000 * _ttft_s(rounds.first),
        "new_cpu_ms": _cpu_ms(rounds.first),
        "later_ttft_ms": 1000 * _ttft_s(rounds.later),
        "later_cpu_ms": _cpu_ms(rounds.later),
        "users_req/s": _requests_per_s(rounds.users),
        "users_cpu_ms": _cpu_ms(rounds.users),
        "bytes_sent": rounds.num_bytes,
    }


def _ttft_s(rounds: list[Held]) -> float:
    return median(median(held.ttft_s(lambda _: True)) for held in rounds)


def _cpu_ms(rounds: list[Held]) -> float:
    return median(1000 * held.cpu_s / held.num_requests for held in rounds)


def _requests_per_s(rounds: list[Held]) -> float:
    return median(held.num_requests / held.wall_s for held in rounds)


def _bars(ours: Rounds, plain: Rounds) -> Iterator[Bar]:
    new, again = f"{NUM_PAGES} pages, new", f"{NUM_PAGES} pages, turns 2 to {NUM_TURNS}"
    for case, own, theirs, cpu, ttft in (
        (new, ours.first, plain.first, 0.7, 0.8),
        (again, ours.later, plain.later, 0.25, 0.15),
    ):
        yield Bar(f"{case}: CPU per request / plain", _cpu_ms(own) / _cpu_ms(theirs), cpu, "at most")
        yield Bar(f"{case}: TTFT p50 / plain", _ttft_s(own) / _ttft_s(theirs), ttft, "at most")
    yield Bar(f"{new}: bytes sent / plain", ours.num_bytes / plain.num_bytes, 0.1, "at most")
    several = f"{NUM_USERS} documents, c={NUM_USERS}: req/s / plain"
    yield Bar(several, _requests_per_s(ours.users) / _requests_per_s(plain.users), 2.0, "at least")


def _cost(dpi: int, *, num_pages: int) -> dict[str, object]:
    """Return what a page costs at this resolution: PDFium's time, and what a client does to send it as an image."""
    rendered, compressed, sizes = [], [], []
    width = height = 0
    for page in pages(paper(0, num_pages)):
        started = time.perf_counter()
        bitmap = page.render(scale=dpi / 72, rev_byteorder=True)
        rendered.append(time.perf_counter() - started)
        started = time.perf_counter()
        sizes.append(len(png(bitmap)))
        compressed.append(time.perf_counter() - started)
        width, height = bitmap.width, bitmap.height
    return {
        "dpi": dpi,
        "A4 in pixels": f"{width}x{height}",
        "render ms": 1000 * median(rendered),
        "as PNG, ms": 1000 * median(compressed),
        "PNG kB": median(sizes) / 1000,
        "tokens of Qwen2.5-VL": round(width / _TOKEN_SIDE) * round(height / _TOKEN_SIDE),
    }


#: Pages by outcome, and how many should be new.
_Counted = tuple[dict[str, float], int]


async def _counted(server: Server, model: str) -> dict[str, _Counted]:
    """Return which pages requests about a paper and its next edition have found, by what the request is."""
    seed = next(_SEEDS)
    edition, next_edition = (_file(paper(seed, number)) for number in (NUM_PAGES, NUM_PAGES + 1))
    async with aiohttp.ClientSession() as session:

        async def ask(parts: list[object], num_pages: int, salt: str = "") -> dict[str, float]:
            before = await _outcomes(session, server)
            body = {"model": model, "messages": [_message([*parts, _question(0)])], "max_tokens": 1}
            body |= {"cache_salt": salt} if salt else {}
            headers = {"content-type": "application/json"}
            url = f"{server.base_url}/chat/completions"
            async with session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {(await response.text())[:500]}")
            async with asyncio.timeout(_COUNTED_S):
                while True:  # a request is counted after its last byte
                    after = await _outcomes(session, server)
                    added = {name: after.get(name, 0) - before.get(name, 0) for name in ("hit", "shared", "new")}
                    if sum(added.values()) >= num_pages:
                        return added
                    await asyncio.sleep(0.05)

        return {
            "new": (await ask(edition, NUM_PAGES), NUM_PAGES),
            "another user, the same": (await ask(edition, NUM_PAGES), 0),
            "a page more at its end": (await ask(next_edition, NUM_PAGES + 1), 1),
            "the same with a salt": (await ask(edition, NUM_PAGES, "one"), NUM_PAGES),
            "with another salt": (await ask(edition, NUM_PAGES, "other"), NUM_PAGES),
        }


async def _outcomes(session: aiohttp.ClientSession, server: Server) -> dict[str, float]:
    async with session.get(f"{server.base_url.removesuffix('/v1')}/metrics") as response:
        text = await response.text()
    found: dict[str, float] = {}
    for outcome, number in re.findall(r'^medialane_document_pages_total{[^}]*outcome="(\w+)"[^}]*} (\S+)$', text, re.M):
        found[outcome] = found.get(outcome, 0.0) + float(number)
    return found
