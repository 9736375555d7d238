"""Makes request validation stop at the first invalid element of a list or dict.

vLLM's app validates bodies on the event loop, and pydantic records an error for every invalid element, times every
branch of its union: two thousand `{}` in the `input` of `/v1/responses` took seconds. Acceptance is unchanged, since
one invalid element suffices to reject a list; vLLM's response lists at most ten errors anyway.

A valid item of `input` takes 50 us as well, for the thirty branches of its union, so a large body is validated in a
thread. pydantic holds the GIL, but a Python function called before each element lets the event loop run in between.

Adapters are patched at their construction in `build_app`: FastAPI makes one for each body, `/invocations` its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

#: pydantic schemas that have the setting `fail_fast`.
_COLLECTIONS = ("list", "dict", "set", "frozenset", "tuple", "deque")

#: Elements that take less time than a call of a Python function.
_ATOM = {"type": "any"}
_ATOMS = ("any", "int", "float", "str", "bool", "literal")

#: Called before each element of a list: entering a Python function, a thread yields the GIL to a waiting one.
_RELEASE_GIL = {"type": "no-info", "function": lambda element: element}

#: Members of a schema that are values, not schemas.
_VALUES = ("default", "expected", "metadata", "members", "serialization")


#: One thread: several would compete with the event loop for the GIL.
VALIDATION = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validation")

#: A body of fewer values is validated on the event loop, in at most 3 ms.
_LARGE_NUM_VALUES = 200


def is_large(body: object) -> bool:
    """Return whether a parsed JSON body is validated in the thread."""
    if not isinstance(body, dict):
        return False
    values: list[object] = [body]
    for value in values:
        if isinstance(value, dict | list):
            if len(values) + len(value) > _LARGE_NUM_VALUES:
                return True
            values += value.values() if isinstance(value, dict) else value
    return False


@contextmanager
def failing_fast() -> Iterator[None]:
    """Make every TypeAdapter constructed within this context fail fast, unless it has its own configuration."""
    make = TypeAdapter.__init__

    def make_fast(
        adapter: TypeAdapter[Any], of: Any, *, config: Any = None, _parent_depth: int = 2, **more: Any
    ) -> None:
        make(adapter, of, config=config, _parent_depth=_parent_depth + 1, **more)
        if config is None and adapter.pydantic_complete:
            # Not with the model's prebuilt validator, which lists every error.
            adapter.validator = SchemaValidator(_fast(adapter.core_schema), _use_prebuilt=False)

    TypeAdapter.__init__ = make_fast  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TypeAdapter.__init__ = make  # type: ignore[method-assign]


def _fast(schema: Any) -> Any:
    """Return a fail-fast copy; schemas are shared with their models."""
    if isinstance(schema, list | tuple):
        return type(schema)(_fast(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    is_schema = isinstance(kind, str)  # otherwise a dict of schemas by name, one of which may be `type` or `default`
    copy = {name: part if is_schema and name in _VALUES else _fast(part) for name, part in schema.items()}
    if kind == "list" and copy.get("items_schema", _ATOM)["type"] not in _ATOMS:
        copy["items_schema"] = {"type": "function-before", "function": _RELEASE_GIL, "schema": copy["items_schema"]}
    return copy | {"fail_fast": True} if kind in _COLLECTIONS else copy
