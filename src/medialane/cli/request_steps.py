"""Where the time of one request goes: the steps in its `Server-Timing`, as `medialane demo` shows them, and
`medialane doctor --request`, which sends requests to a running gateway and explains theirs."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from medialane.cli.workers import Fetched, GatewayAdmin, error_message, gateway_at
from medialane.observability import INNER_STEPS, STEPS, StepName
from medialane.testing.sample_media import sample_jpeg
from medialane.types.errors import StartupFailed

#: What a request waits for in each step.
TEXTS: Mapping[StepName, str] = {
    "upload": "its header is checked, its body arrives",
    "intake": "media are taken out of the body",
    "open": "documents are opened: fetched, their pages measured, texts read",
    "admission": "it waits for its turn, or for room in an engine",
    "parse": "vLLM's app checks and converts it",
    "render": "chat template, then token ids",
    "store": "its media are found or made",
    "fetch": "hashed, looked up, or fetched",
    "decode": "decoded, in a sandbox",
    "process": "made tensors by the model's processor",
    "assemble": "placeholders in the prompt are expanded",
    "encode": "an encoder makes embeddings, if that pays",
    "route": "a worker is chosen",
    "handover": "the worker is sent the request",
    "transit": "the way to the engine and back",
    "queue": "it waits in the engine",
    "prefill": "the engine computes the prompt",
    "first_token": "transit, queue and prefill",
    "answer": "the other tokens are generated",
    "response": "the response is made of them",
}

_MAX_TOKENS = 16
_TIMEOUT_S = 300.0


class Timing(NamedTuple):
    """A `Server-Timing` header: milliseconds by step, of the whole until the header was sent, and what else it says."""

    steps_ms: Mapping[str, float]
    total_ms: float
    described: Mapping[str, str]

    @classmethod
    def of(cls, header: str) -> Timing:
        durations = {name: float(ms) for name, ms in re.findall(r"\b(\w++);dur=([\d.]+)", header)}
        total_ms = durations.pop("total", 0.0)
        return cls(durations, total_ms, dict(re.findall(r'\b(\w++);desc="([^"]*)"', header)))


class Asked(NamedTuple):
    """A request that was answered, after `ms` at the client; of one that was refused, `refusal` says why."""

    name: str
    ms: float
    timing: Timing
    refusal: str = ""

    def as_json(self) -> dict[str, object]:
        if self.refusal:
            return {"request": self.name, "refusal": self.refusal}
        steps_ms, total_ms, _ = self.timing
        return {"request": self.name, "client_ms": round(self.ms, 2), "total_ms": total_ms, "steps_ms": steps_ms}


async def explain(url: str, *, model: str | None, key: str, as_json: bool) -> int:
    """Ask the gateway at `url`, and print where the time has gone; 1 if it refuses text. Raises StartupFailed."""
    async with gateway_at(url, key, verify=True, timeout_s=_TIMEOUT_S) as gateway:
        model = await _model(gateway, model)
        # New to all caches, so that each step does what it does for a first request.
        text = {"type": "text", "text": f"Number {secrets.randbits(64)}: describe it in a few words."}
        image = base64.b64encode(sample_jpeg(secrets.randbits(31))).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}
        asked = [await _ask(gateway, "text", model, [text])]
        if not asked[0].refusal:
            asked.append(await _ask(gateway, "new image, 1024x768", model, [part, text]))
    if as_json:
        print(json.dumps([each.as_json() for each in asked], indent=2))
    else:
        console = Console(highlight=False)
        for each in asked:
            _show(console, each)
    return int(bool(asked[0].refusal))


async def _model(gateway: GatewayAdmin, wanted: str | None) -> str:
    """Return the model to ask: `wanted`, by default the first one. Raises StartupFailed."""
    fetched = await gateway.fetch("GET", "/v1/models")
    if fetched.status in (401, 403):
        raise StartupFailed(f"the gateway at {gateway.url} needs the key of a client: set VLLM_API_KEY to one")
    try:
        served = [str(model["id"]) for model in json.loads(fetched.body)["data"]]
    except (ValueError, LookupError, TypeError):
        raise StartupFailed(f"the gateway at {gateway.url} lists no models: {_reason(fetched)}") from None
    if wanted is not None and wanted not in served:
        raise StartupFailed(f"the gateway at {gateway.url} does not serve {wanted}, but {', '.join(served)}")
    return wanted or served[0]


async def _ask(gateway: GatewayAdmin, name: str, model: str, content: list[dict[str, Any]]) -> Asked:
    """Send a request that is not streamed: only then has the header all steps. Raises StartupFailed."""
    message = {"role": "user", "content": content}
    document = {"model": model, "messages": [message], "max_tokens": _MAX_TOKENS, "temperature": 0}
    started = time.perf_counter()
    fetched = await gateway.fetch("POST", "/v1/chat/completions", document)
    ms, timing = (time.perf_counter() - started) * 1000, Timing.of(fetched.server_timing)
    if fetched.status == 200 and not timing.total_ms:
        raise StartupFailed(f"{gateway.url} is not a gateway of medialane: its answers have no Server-Timing")
    return Asked(name, ms, timing, "" if fetched.status == 200 else _reason(fetched))


def _show(console: Console, asked: Asked) -> None:
    if asked.refusal:
        console.print(f"{asked.name}: refused: {asked.refusal}", markup=False, soft_wrap=True)
        return
    steps_ms, total_ms = asked.timing.steps_ms, asked.timing.total_ms
    table = Table("step", "ms", "share", "", title=f"{asked.name}: {total_ms:.1f} ms", title_justify="left")
    for name in STEPS:
        if name in steps_ms:
            is_inner, ms = name in INNER_STEPS, steps_ms[name]
            share = "" if is_inner else f"{ms / total_ms:.1%}"
            table.add_row(f"  {name}" if is_inner else name, f"{ms:.1f}", share, TEXTS[name])
    named_ms = sum(ms for name, ms in steps_ms.items() if name not in INNER_STEPS)
    table.add_row("all", f"{named_ms:.1f}", f"{named_ms / total_ms:.1%}", "but the indented: parts of others")
    table.add_row("client", f"{asked.ms:.1f}", "", "as measured here, with HTTP")
    console.print(table)


def _reason(fetched: Fetched) -> str:
    return error_message(fetched.body) or f"status {fetched.status}"
