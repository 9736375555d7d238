"""How vLLM's front end starts its EngineCore processes: on a CPU by `spawn`, as new interpreters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext

from vllm.ray.lazy_utils import is_in_ray_actor
from vllm.v1.engine import utils


@contextmanager
def engines_of(context: Callable[[], BaseContext | None]) -> Iterator[None]:
    """Make vLLM start the engines of this block by the context that is returned; by its own if that is None."""
    inner = utils.get_mp_context
    utils.get_mp_context = lambda: context() or inner()
    try:
        yield
    finally:
        utils.get_mp_context = inner


def why_spawned() -> str:
    """Return why vLLM would not fork on any platform; empty if it would."""
    if "--numa-bind" in sys.argv:
        return "--numa-bind"
    return "in a Ray actor" if is_in_ray_actor() else ""
