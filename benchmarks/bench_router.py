"""`medialane bench router`: the cost of tracking which worker holds which blocks, and of choosing a worker.

`hashing`: from token ids to block ids, for blocks of 16 tokens; `list` is the cost of first converting a list of ints.
`memory`: bytes of the index per block and holder. `events`: blocks per second from a worker's message to the index, in
batches of 64 blocks, with 1000 slots and a million blocks indexed; and how long one large message blocks the event
loop. `match`: longest prefixes of one prompt for all slots at once, in a synthetic cluster (`indexed_prompts.py`), with
500 requests in flight whose blocks are pending; every prompt is different, so that CPU caches are as cold as in
production. `decision`: everything that the gateway does from a prompt's block ids to its worker, including that search
but not hashing: choice and bookkeeping (`decision_rows.py`).

Times are thread CPU time: nothing here blocks, and other load on the machine is not counted.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from decision_rows import decision_rows
from harness import Bar, Options, Report, median, percentile
from indexed_prompts import IndexedPrompts
from medialane.routing import BlockIndex
from medialane.routing.block_index import PendingBlocks
from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import prompt_block_ids, token_array
from medialane.worker.reports import PIECE_BLOCKS

ABOUT = "hashing, the index of KV blocks, and the choice of a worker"

BLOCK = 16
TOKENS = (1024, 8192, 32768, 131072)
NUM_IMAGES, IMAGE_TOKENS = 32, 1200
#: Slots and indexed blocks.
CLUSTERS = ((1, 100_000), (64, 100_000), (1000, 100_000), (1, 1_000_000), (64, 1_000_000), (1000, 1_000_000))
PROMPT_BLOCKS = (64, 512, 2048, 8192)
IN_FLIGHT = 500
EVENT_BLOCKS = 64
#: Blocks in a large GPU's KV cache; blocks swept per call; most blocks per message.
LOST_BLOCKS, SWEPT_BLOCKS, SNAPSHOT_PART_BLOCKS = 100_000, 256, PIECE_BLOCKS

HASHING_MS, EVENTS_PER_S, ENTRY_BYTES = 1.5, 500_000, 200
#: By slots, indexed blocks, and blocks of the prompt.
DECISION_US: Mapping[object, int] = {(64, 100_000, 512): 75, (1000, 1_000_000, 512): 130, (1000, 1_000_000, 8192): 180}
#: Longest time that one step may block the event loop.
LOOP_MS = 10


def run(options: Options) -> Report:
    rounds = options.rounds or (100 if options.quick else 2000)
    clusters = CLUSTERS[1:3] if options.quick else CLUSTERS
    num_blocks = clusters[-1][1]
    report = Report("router")
    _memory(report, num_blocks)
    _hashing(report, rounds=max(20, rounds // 20))
    _events(report, num_blocks)
    _match(report, clusters, rounds)
    _decisions(report, clusters, rounds)
    return report


def _hashing(report: Report, *, rounds: int) -> None:
    rows: list[dict[str, object]] = []
    for num_tokens in TOKENS:
        tokens = np.random.default_rng(1).integers(0, 151_936, num_tokens, dtype=np.uint32)
        listed, media = tokens.tolist(), _images(num_tokens)
        rows.append(
            {
                "tokens": num_tokens,
                "images": len(media),
                "text ms": _median_ms(partial(prompt_block_ids, tokens, block_size=BLOCK), rounds),
                "with images ms": _median_ms(partial(prompt_block_ids, tokens, block_size=BLOCK, media=media), rounds),
                "list ms": _median_ms(partial(token_array, listed), rounds),
            }
        )
    report.tables["hashing"] = rows
    worst = float(str(rows[-1]["with images ms"]))
    report.bars.append(Bar("hashing 128k tokens with 32 images, ms", worst, HASHING_MS, "at most"))


def _images(num_tokens: int) -> list[MediaSpan]:
    each = max(1, num_tokens * NUM_IMAGES // TOKENS[-1])
    apart = num_tokens // each
    return [MediaSpan(f"{n:064x}", n * apart + 5, min(IMAGE_TOKENS, apart - 5)) for n in range(each)]


def _median_ms(call: Callable[[], object], rounds: int) -> float:
    return median(_timed(call) for _ in range(rounds)) * 1e3


def _timed(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _memory(report: Report, num_blocks: int) -> None:
    rows: list[dict[str, object]] = []
    for holders in (1, 2, 4):
        tracemalloc.start()
        index = BlockIndex()
        for first in range(0, num_blocks // holders, 1024):
            ids = np.random.default_rng(first).integers(0, 1 << 64, 1024, dtype=np.uint64)
            for slot in range(holders):
                index.store(first // 1024 % 990 + slot, ids)
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        rows.append(
            {
                "blocks": index.num_blocks,
                "holders of each": holders,
                "MiB": used / 2**20,
                "bytes a block and holder": used / index.num_entries,
            }
        )
    report.tables["memory"] = rows
    worst = max(float(str(row["bytes a block and holder"])) for row in rows)
    report.bars.append(Bar("bytes a block and holder", worst, ENTRY_BYTES, "at most"))


def _events(report: Report, num_blocks: int) -> None:
    index, prompts = BlockIndex(), IndexedPrompts(num_slots=1000, num_blocks=num_blocks)
    prompts.store(index.store)
    messages = list(_messages(prompts, 2000))
    rates = {}
    for name, apply in (("stored", index.store), ("removed", index.remove)):
        took = _timed(partial(_apply, messages, apply))
        rates[name] = len(messages) * EVENT_BLOCKS / took
    part = prompts.new_blocks(SNAPSHOT_PART_BLOCKS)
    lost = prompts.new_blocks(LOST_BLOCKS)
    index.store(7, lost)
    rows: list[dict[str, object]] = [
        {"what": f"{name}, in batches of {EVENT_BLOCKS}", "blocks/s": rate, "loop held ms": EVENT_BLOCKS / rate * 1e3}
        for name, rate in rates.items()
    ]
    for name, count, call in (
        (f"slot with {LOST_BLOCKS} blocks lost", LOST_BLOCKS, lambda: index.clear(7)),
        ("what is swept with a call", SWEPT_BLOCKS, index.sweep),
        ("part of a snapshot, and what is swept with it", SNAPSHOT_PART_BLOCKS, lambda: index.replace(8, part)),
    ):
        took = _timed(call)
        rows.append({"what": name, "blocks/s": count / took, "loop held ms": took * 1e3})
    report.tables["events"] = rows
    longest = max(float(str(row["loop held ms"])) for row in rows)
    report.bars.append(Bar("longest step of the index, ms", longest, LOOP_MS, "at most"))
    for name, rate in rates.items():
        report.bars.append(Bar(f"{name} blocks/s", rate, EVENTS_PER_S, "at least"))


def _messages(prompts: IndexedPrompts, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole blocks of sessions, in a slot's order, as they are received from workers."""
    for number in range(count // 4):
        for _ in range(4):
            yield number * 7 % 1000, prompts.new_blocks(EVENT_BLOCKS).tobytes()


def _apply(messages: list[tuple[int, bytes]], apply: Callable[[int, NDArray[np.uint64]], None]) -> None:
    for slot, message in messages:
        apply(slot, np.frombuffer(message, np.uint64))


def _match(report: Report, clusters: tuple[tuple[int, int], ...], rounds: int) -> None:
    rows: list[dict[str, object]] = []
    for num_slots, num_blocks in clusters:
        index, prompts = BlockIndex(), IndexedPrompts(num_slots=num_slots, num_blocks=num_blocks)
        prompts.store(index.store)
        pending = PendingBlocks(ttl_s=60.0, clock=time.monotonic)
        for number in range(IN_FLIGHT):
            pending.add(number % num_slots, prompts.arriving(512))
        rows += [_match_row(index, pending, prompts, length=length, rounds=rounds) for length in PROMPT_BLOCKS]
    report.tables["match"] = rows


def _match_row(
    index: BlockIndex, pending: PendingBlocks, prompts: IndexedPrompts, *, length: int, rounds: int
) -> dict[str, object]:
    everyone = (1 << prompts.num_slots) - 1
    times, adding = [], []
    for _ in range(rounds):
        ids = prompts.arriving(length)
        took = _timed(partial(index.prefixes, ids, everyone)) + _timed(partial(pending.prefixes, ids, everyone))
        times.append(took * 1e6)
        started = time.thread_time()
        prefix = pending.add(0, ids)
        adding.append((time.thread_time() - started) * 1e6)
        pending.forget(prefix)
    return {
        "blocks indexed": prompts.num_blocks,
        "slots": prompts.num_slots,
        "prompt blocks": length,
        "p50 us": median(times),
        "p99 us": percentile(times, 0.99),
        "add pending p50 us": median(adding),
    }


def _decisions(report: Report, clusters: tuple[tuple[int, int], ...], rounds: int) -> None:
    rows: list[dict[str, object]] = []
    for num_slots, num_blocks in clusters:
        rows += decision_rows(num_slots=num_slots, num_blocks=num_blocks, lengths=PROMPT_BLOCKS, rounds=rounds)
    report.tables["decision"] = rows
    for row in rows:
        limit = DECISION_US.get((row["slots"], row["blocks indexed"], row["prompt blocks"]))
        if limit is not None:
            what = f"{row['prompt blocks']} blocks, {row['slots']} slots, {row['blocks indexed']} blocks indexed"
            report.bars.append(Bar(f"choose + begin: {what}, p50 us", float(str(row["both p50 us"])), limit, "at most"))
