"""Validation of requests that stops at the first bad element of a list or dict.

vLLM's app validates bodies on the event loop, and pydantic makes an error of every bad element, times every branch of
its union: two thousand `{}` in the `input` of `/v1/responses` took seconds. What is accepted stays the same, since a
list is refused by its first bad element as well as by all of them; vLLM's answer lists ten errors at most anyway.

Adapters are rebuilt where they are made, in `build_app`: FastAPI makes one for each body, `/invocations` its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

#: Schemas of pydantic's that have the setting `fail_fast`.
_COLLECTIONS = ("list", "dict", "set", "frozenset", "tuple", "deque")

#: Members of a schema that are values, not schemas.
_VALUES = ("default", "expected", "metadata", "members", "serialization")


@contextmanager
def failing_fast() -> Iterator[None]:
    """Every TypeAdapter that is made meanwhile fails fast, if it has no configuration of its own."""
    make = TypeAdapter.__init__

    def make_fast(
        adapter: TypeAdapter[Any], of: Any, *, config: Any = None, _parent_depth: int = 2, **more: Any
    ) -> None:
        make(adapter, of, config=config, _parent_depth=_parent_depth + 1, **more)
        if config is None and adapter.pydantic_complete:
            # Not with the model's validator that is built already, which lists every error.
            adapter.validator = SchemaValidator(_fast(adapter.core_schema), _use_prebuilt=False)

    TypeAdapter.__init__ = make_fast  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TypeAdapter.__init__ = make  # type: ignore[method-assign]


def _fast(schema: Any) -> Any:
    """A copy; schemas are shared with their models."""
    if isinstance(schema, list | tuple):
        return type(schema)(_fast(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    is_schema = isinstance(kind, str)  # else a dict of schemas by name, of which one may be named `type` or `default`
    copy = {name: part if is_schema and name in _VALUES else _fast(part) for name, part in schema.items()}
    return copy | {"fail_fast": True} if kind in _COLLECTIONS else copy
