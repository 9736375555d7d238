"""Checks that a model is available: in the local cache, or from the hub within seconds.

vLLM requests one file after another from the hub, each with retries, and its error names neither model nor hub: a
mistyped name without a network is reported here after 3 s, there after two minutes.
"""

from __future__ import annotations

import queue
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from medialane.types.errors import StartupFailed

#: Covers name resolution, TLS and both requests. Importing vLLM takes longer.
DEADLINE_S = 4.0

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("config.json", "params.json")


def find_on_hub(model: str, revision: str | None = None, *, only_name: bool = False) -> None:
    """Raise StartupFailed for an invalid model name and, unless `only_name`, for a model that is not available."""
    if not is_hub_name(model):
        raise StartupFailed(f"{model} is neither an existing folder nor a valid model name")
    if only_name:
        return
    from huggingface_hub import constants, get_token, try_to_load_from_cache  # comes with vLLM; half a second

    if any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in _CONFIGS):
        return
    missing = f"model {model} is neither a folder nor in this machine's cache of models"
    if constants.HF_HUB_OFFLINE:
        raise StartupFailed(f"{missing}, and HF_HUB_OFFLINE disables access to the hub")
    base = f"{constants.ENDPOINT}/{model}/resolve/{revision or 'main'}"
    why = _within(DEADLINE_S, lambda: _query(base, get_token()))
    if why is not None:
        raise StartupFailed(f"{missing}, and the hub {constants.ENDPOINT} {why}")


def is_hub_name(model: str) -> bool:
    """Return whether a string could be the name of a model on the hub."""
    return _HUB_NAME.fullmatch(model) is not None and not model.startswith((".", "-"))


def _query(base: str, token: str | None) -> str | None:
    """Return why the hub does not provide the model; None if it does."""
    why = None
    for name in _CONFIGS:
        why = _query_file(f"{base}/{name}", token)
        if why != _UNKNOWN:
            return why
    return why


_UNKNOWN = "does not have it (a private one needs HF_TOKEN)"


def _query_file(url: str, token: str | None) -> str | None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method="HEAD")  # noqa: S310 - the operator's own hub
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return _UNKNOWN
            if error.code in (401, 403):
                known = error.headers.get("x-error-code") == "GatedRepo"
                return "requires an HF_TOKEN with access to it" if known else _UNKNOWN
            return None if error.code == 429 else f"returned status {error.code}"
    except (OSError, ValueError) as error:
        return f"cannot be reached: {getattr(error, 'reason', error)}"


def _within(seconds: float, work: Callable[[], str | None]) -> str | None:
    """Return the result of `work`, run in a thread that is abandoned after the timeout: name resolution has none."""
    done: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(work()), name="model hub", daemon=True).start()
    try:
        return done.get(timeout=seconds)
    except queue.Empty:
        return f"has not responded within {seconds:g} s"
