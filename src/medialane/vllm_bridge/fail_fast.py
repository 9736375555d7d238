"""Makes request validation stop at the first invalid element of a list or dict.

vLLM's app validates bodies on the event loop, and pydantic records an error for every invalid element, times every
branch of its union: two thousand `{}` in the `input` of `/v1/responses` took seconds. Acceptance is unchanged, since
one invalid element suffices to reject a list; vLLM's response lists at most ten errors anyway.

Adapters are patched at their construction in `build_app`: FastAPI makes one for each body, `/invocations` its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

#: pydantic schemas that have the setting `fail_fast`.
_COLLECTIONS = ("list", "dict", "set", "frozenset", "tuple", "deque")

#: Members of a schema that are values, not schemas.
_VALUES = ("default", "expected", "metadata", "members", "serialization")


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
    return copy | {"fail_fast": True} if kind in _COLLECTIONS else copy
