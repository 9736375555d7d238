"""Size limits of a request's options (`mm_processor_kwargs`, `media_io_kwargs`).

They are part of cache keys, are sent to preparers and workers, and reach the model's processor. Options larger than any
processor needs are rejected here, in one pass that stops at the first limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from medialane.core.errors import InvalidRequest

#: The longest list in practice is a video's `frames_indices`: 768 by default.
MAX_VALUES = 2048
MAX_BYTES = 64 * 1024
MAX_DEPTH = 8

#: Bounds of an integer that is valid in both JSON and msgpack.
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def check_options(options: object, param: str) -> None:
    """Raise InvalidRequest naming `param` for options that are too large, too deep, or not JSON."""
    num_values = num_bytes = 0
    todo = [(param, options, 1)]
    while todo:
        path, value, depth = todo.pop()
        num_values += 1
        num_bytes += _bytes_of(value, path)
        num_inside = len(value) if isinstance(value, Mapping | list | tuple) else 0
        if num_inside and depth > MAX_DEPTH:
            raise InvalidRequest(f"the options are nested deeper than {MAX_DEPTH} levels", param=param)
        if num_values + len(todo) + num_inside > MAX_VALUES:
            raise InvalidRequest(f"the options have more than {MAX_VALUES} values", param=param)
        if isinstance(value, Mapping):
            num_bytes += sum(len(key) for key in value if isinstance(key, str))
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(f"the options are larger than {MAX_BYTES} bytes", param=param)
        todo += [(name, found, depth + 1) for name, found in _inside(value, path)]


def _inside(value: object, path: str) -> list[tuple[str, object]]:
    """Return the members of an object or list, each with its path for error messages."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest("the names of options must be strings", param=path)
        return [(f"{path}.{key}", found) for key, found in value.items()]
    return [(f"{path}[{n}]", found) for n, found in enumerate(value)] if isinstance(value, list | tuple) else []


def _bytes_of(value: object, param: str) -> int:
    """Return the approximate encoded size. Raises InvalidRequest for values that JSON or msgpack cannot represent."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise InvalidRequest("the options have an integer of more than 64 bits", param=param)
    if isinstance(value, float) and value - value != 0:  # infinite, or not a number
        raise InvalidRequest("the options have a number that JSON cannot represent", param=param)
    if value is None or isinstance(value, bool | int | float | Mapping | list | tuple):
        return 8
    raise InvalidRequest("the options have a value that JSON cannot represent", param=param)
