"""`medialane top`: what the page at /medialane/ shows, in a terminal: requests by stage, workers, store, errors."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
from collections.abc import Iterable, Sequence

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from medialane.cli.gateway_url import add_gateways, base_url, endpoint, gateway_urls, several_models
from medialane.config import load_config
from medialane.core.byte_size import format_bytes
from medialane.core.errors import StartupFailed
from medialane.core.http_failure import describe_failure
from medialane.gateway.access import operator_key
from medialane.gateway.operators.endpoints import STATE_PATH
from medialane.gateway.operators.state import GroupView, State, WorkersView, WorkerView
from medialane.gateway.requests import RequestView

_TIMEOUT_S = 10.0
#: Narrower terminals get fewer columns.
_WIDE, _NARROW = 100, 60
#: Steps of the rates that a figure is the mean of.
_RECENT_STEPS = 3
#: Lines that are not rows of workers or requests.
_NUM_OTHER_LINES = 22
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"ready": "green", "ok": "green", "draining": "yellow", "starting": "yellow", "degraded": "yellow"}

_EPILOG = """\
It shows all clients' requests, so it needs the admin key of the server (--admin-key-file, MEDIALANE_ADMIN_KEY), unless
that has none and listens on this machine only. One gateway answers for all gateways of its port. Ctrl-C ends it.

The exit status is 0 if all gateways answered, else 2.

examples:
  medialane top
  medialane top --gateway http://10.0.0.1:8000 --gateway http://10.0.0.2:8000 --admin-key-file admin.key
  medialane top --once --json | jq .workers.states    # see docs/reference/state.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_gateways(parser)
    parser.add_argument("--admin-key-file", metavar="FILE", help="file with the admin key of the gateways")
    parser.add_argument("--once", action="store_true", help="print the state once")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, a list if --gateway is repeated")
    parser.add_argument("--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks (1)")


def run(args: argparse.Namespace) -> int:
    """Raises StartupFailed if the only gateway does not answer."""
    if args.json and not args.once:
        raise StartupFailed("--json needs --once")
    urls = [base_url(url) for url in gateway_urls(args)]
    files = {} if args.admin_key_file is None else {"admin-key-file": args.admin_key_file}
    key = operator_key(load_config(files).gateway)
    if args.once:
        return asyncio.run(_once(urls, key, verify=not args.insecure, as_json=args.json))
    return asyncio.run(_watch(urls, key, verify=not args.insecure, interval_s=args.interval))


async def _once(urls: Sequence[str], key: str, *, verify: bool, as_json: bool) -> int:
    async with _session(key, verify=verify) as session:
        found = await _read_all(session, urls)
    if len(found) == 1 and isinstance(found[0], StartupFailed):
        raise found[0]
    if as_json:
        documents = [_document(url, each) for url, each in zip(urls, found, strict=True)]
        encoded = msgspec.json.encode(documents if len(documents) > 1 else documents[0])
        print(msgspec.json.format(encoded).decode())
    else:
        Console(highlight=False).print(screen(urls, found, width=Console().width, max_rows=1000))
    return 2 if any(isinstance(each, StartupFailed) for each in found) else 0


async def _watch(urls: Sequence[str], key: str, *, verify: bool, interval_s: float) -> int:
    """Show the state until Ctrl-C. A gateway that does not answer is shown as such: it may be back."""
    console, stop = Console(highlight=False), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    found: list[State | StartupFailed] = []
    async with _session(key, verify=verify) as session:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=True) as live:
            while not stop.is_set():
                found = await _read_all(session, urls)
                rows = max(4, console.height - _NUM_OTHER_LINES)
                live.update(screen(urls, found, width=console.width, max_rows=rows), refresh=True)
                try:
                    async with asyncio.timeout(interval_s):
                        await stop.wait()
                except TimeoutError:
                    continue
    return 2 if any(isinstance(each, StartupFailed) for each in found) else 0


def _session(key: str, *, verify: bool) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        connector=aiohttp.TCPConnector(ssl=verify),
    )


async def _read_all(session: aiohttp.ClientSession, urls: Sequence[str]) -> list[State | StartupFailed]:
    return await asyncio.gather(*(_read(session, url) for url in urls))


async def _read(session: aiohttp.ClientSession, url: str) -> State | StartupFailed:
    try:
        async with session.get(endpoint(url, STATE_PATH), allow_redirects=False) as response:
            body = await response.read()
            if response.status != 200:
                return StartupFailed(f"{url}: {_refusal(response.status, body)}")
            if body.startswith(b'{"models":'):
                return several_models(url, [each["name"] for each in msgspec.json.decode(body)["models"]])
            return msgspec.json.decode(body, type=State)
    except (aiohttp.ClientError, TimeoutError) as error:
        return StartupFailed(f"{url}: {describe_failure(error)}")
    except msgspec.DecodeError as error:
        return StartupFailed(f"{url}: the answer is not that of a gateway of this version ({error})")


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    error: _ErrorBody | str = ""


def _refusal(status: int, body: bytes) -> str:
    if status == 401:
        return "needs the admin key: --admin-key-file FILE, or MEDIALANE_ADMIN_KEY"
    if status == 404:
        return "has no state to show: it is not a gateway of this version, or has --no-page"
    try:
        error = msgspec.json.decode(body, type=_Refused).error
    except msgspec.DecodeError:
        return f"answers {status}"
    return f"answers {status}: {error if isinstance(error, str) else error.message}"


def _document(url: str, found: State | StartupFailed) -> object:
    if isinstance(found, StartupFailed):
        return {"url": url, "error": found.message}
    return {"url": url, **msgspec.to_builtins(found)}


def screen(urls: Sequence[str], found: Sequence[State | StartupFailed], *, width: int, max_rows: int) -> RenderableType:
    """Return what is shown of these gateways, with so many rows of workers and of requests in all."""
    parts: list[RenderableType] = []
    for url, state in zip(urls, found, strict=True):
        if len(urls) > 1:
            parts.append(Text(url, style="bold"))
        if isinstance(state, StartupFailed):
            parts.append(Text(state.message, style="red"))
        else:
            parts += _shown(state, width=width, max_rows=max(4, max_rows // len(urls)))
    return Group(*parts)


def _shown(state: State, *, width: int, max_rows: int) -> Iterable[RenderableType]:
    is_wide = width >= _WIDE
    yield _heading(state)
    yield _rates(state, is_wide=is_wide)
    yield _stages(state)
    for gateway in state.gateways:
        for problem in gateway.problems if gateway.up else ("does not answer",):
            yield Text(f"gateway {gateway.index}: {problem}", style="yellow" if gateway.up else "red")
    num_workers = max(2, max_rows // 2)
    yield _workers(state.workers, "worker", width=width, max_rows=num_workers)
    if state.encoders.num:
        yield _workers(state.encoders, "encoder", width=width, max_rows=num_workers)
    yield _store(state)
    yield _caches(state)
    for title, groups, what in (("tenant", state.tenants, "first token"), ("origin", state.origins, "fetch")):
        if groups:
            yield _groups(title, groups[:5], what, width=width)
    yield _errors(state, width=width)
    if state.live.listed:
        yield _requests(state.live.listed, state.live.num, is_wide=is_wide, max_rows=max(2, max_rows - num_workers))


def _heading(state: State) -> Text:
    num_up = sum(gateway.up for gateway in state.gateways)
    text = Text.assemble((state.model, "bold"), f"  {num_up} of {len(state.gateways)} gateways, ")
    text.append(f"{state.workers.states.get('ready', 0)} of {state.workers.num} workers ready, ")
    requests = "1 request" if state.live.num == 1 else f"{state.live.num} requests"
    text.append(requests, style="bold" if state.live.num else "")
    return text


def _rates(state: State, *, is_wide: bool) -> Text:
    values = state.rates.values

    def rate(name: str) -> float:
        ended = [value or 0.0 for value in values[name][-_RECENT_STEPS - 1 : -1]]
        return sum(ended) / (len(ended) * state.rates.step_s) if ended else 0.0

    p95 = [value for value in values["ttft_p95_ms"][-_RECENT_STEPS - 1 : -1] if value is not None]
    text = Text(f"{rate('requests'):.1f} requests/s  {rate('generated_tokens'):.0f} tokens/s out")
    text.append(f"  {rate('prompt_tokens'):.0f} in  first token p95 {_ms(max(p95, default=None))}")
    if failed := rate("failed"):
        text.append(f"  {failed:.1f} failed/s", style="red")
    if is_wide:
        text.append("  " + sparkline(values["requests"], 45), style="cyan")
    return text


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the values as so many bars, each the highest of its share."""
    size = math.ceil(len(values) / width)
    highest = [max(value or 0.0 for value in values[at : at + size]) for at in range(0, len(values), size)]
    top = max(highest, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] if top else _BARS[0] for value in highest)


def _stages(state: State) -> Text:
    if not state.live.stages:
        return Text("no requests are running", style="dim")
    text = Text()
    for stage in state.live.stages:
        is_old = stage.stage != "answer" and stage.oldest_ms > 1000
        text.append(f"{stage.stage} {stage.num}", style="bold")
        text.append(f" ({_ms(stage.oldest_ms)})  ", style="red" if is_old else "dim")
    return text


def _workers(workers: WorkersView, title: str, *, width: int, max_rows: int) -> RenderableType:
    if not workers.num:
        return Text(f"no {title} has joined", style="yellow")
    columns = [
        title,
        "state",
        "running",
        "waiting",
        "KV cache",
        "TTFT p95",
        "encoder cache",
        "TTFT p50",
        "oldest",
        "failed",
    ]
    num_columns = len(columns) if width >= _WIDE else 6 if width >= _NARROW else 4
    table = _table(*columns[:num_columns])
    for worker in workers.listed[:max_rows]:
        table.add_row(*_worker(worker)[:num_columns])
    if workers.num > max_rows:
        others = f"{workers.num - max_rows} more: " + ", ".join(f"{n} {name}" for name, n in workers.states.items())
        table.add_row(Text(f"and {others} in all", style="dim"))
    return table


def _worker(worker: WorkerView) -> Sequence[RenderableType]:
    is_late, cache = (worker.oldest_ms or 0.0) > 1000, worker.encoder_cache
    return [
        Text(worker.name, style="red" if worker.state in ("lost", "stalled") else ""),
        _state(worker.state),
        str(worker.running),
        Text(str(worker.waiting), style="yellow" if worker.waiting else ""),
        f"{worker.kv_usage:.0%}",
        _ms(worker.first_token_p95_ms),
        "-" if cache is None else f"{cache.used / cache.size:.0%}",
        _ms(worker.first_token_p50_ms),
        Text(_ms(worker.oldest_ms), style="red" if is_late else ""),
        Text(str(worker.failed), style="red" if worker.failed else "dim"),
    ]


def _store(state: State) -> Text:
    store = state.store
    if store is None:
        return Text("store: none, the model takes no media", style="dim")
    text = Text.assemble("store ", _state(store.state))
    if store.problem:
        text.append(f" {store.problem}", style="yellow")
    if store.arena is not None:
        arena = store.arena
        used = arena.size_bytes - arena.free_bytes
        text.append(f"  arena {format_bytes(used)} of {format_bytes(arena.size_bytes)}: ")
        kinds = (f"{kind} {format_bytes(size)}" for kind, size in arena.kinds.items() if size)
        text.append(", ".join(kinds) or "empty")
    if store.preparers is not None:
        pool = store.preparers
        text.append(f"  preparers {pool.busy} of {pool.alive} busy, {pool.queued} queued")
    return text


def _caches(state: State) -> Text:
    caches, items = state.caches, sum(state.caches.items.values())
    shares = ", ".join(f"{number} {name}" for name, number in caches.items.items() if number)
    text = Text(f"last {state.window_s:.0f} s: " + (f"{items} items ({shares})" if items else "no items"))
    if caches.prompt_tokens:
        text.append(f", {caches.cached_tokens / caches.prompt_tokens:.0%} of prompt tokens were in KV caches")
    return text


def _groups(title: str, groups: Sequence[GroupView], what: str, *, width: int) -> Table:
    columns = ["requests", f"{what} p95", "running", "new", "oldest", "failed"]
    num_columns = len(columns) if width >= _WIDE else 4 if width >= _NARROW else 2
    table = _table(title, *columns[:num_columns])
    for group in groups:
        cells = [str(group.requests), _ms(group.p95_ms), str(group.live), str(group.new)]
        cells += [_ms(group.oldest_ms), str(group.failed)]
        table.add_row(escape(group.name), *cells[:num_columns])
    return table


def _errors(state: State, *, width: int) -> RenderableType:
    if not state.errors:
        return Text("no errors in the last 15 minutes", style="dim")
    table = _table("error", "number", "last", *(("reason",) if width >= _NARROW else ()))
    for error in state.errors[:5]:
        ago = "-" if error.last_at is None else f"{max(0.0, state.time - error.last_at):.0f} s ago"
        cells: list[RenderableType] = [
            Text(error.code, style="red"),
            str(error.num),
            ago,
            Text(error.reason, style="dim"),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _requests(requests: Sequence[RequestView], num: int, *, is_wide: bool, max_rows: int) -> Table:
    table = _table("request", "stage", "age", "worker", *(("items", "tokens", "tenant") if is_wide else ()))
    for view in requests[:max_rows]:
        cells = [escape(view.id[:12]), view.stage or "", _ms(view.total_ms), escape(view.worker or "-")]
        if is_wide:
            cells += [_items(view), str(view.generated_tokens), escape(view.tenant or "-")]
        table.add_row(*cells)
    if num > max_rows:
        table.add_row(Text(f"and {num - max_rows} more", style="dim"))
    return table


def _items(view: RequestView) -> str:
    counts: dict[str, int] = {}
    for item in view.items:
        what = f"{item.modality} {item.outcome or item.stage or ''}".strip()
        counts[what] = counts.get(what, 0) + 1
    return ", ".join(f"{number} {what}" if number > 1 else what for what, number in counts.items()) or "text"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=8)
    for name in others:
        is_text = name in ("state", "stage", "worker", "items", "tenant", "reason")
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if is_text else "right")
    return table


def _state(name: str) -> Text:
    return Text(name, style=_COLOURS.get(name, "red"))


def _ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return seconds
