"""Passes many arrays to native code as one argument.

Passing an array to native code takes half a microsecond, and a routing decision needs about ten. Arrays that stay the
same between calls are passed as a view: one array of their addresses and shapes.

Only a `View` writes addresses, and it holds references to the arrays, so they live as long as the view. Each view has a
layout, defined next to the native function that reads it: an array of a different dtype or rank is rejected before its
address is written.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from medialane.core.compiled import compiled_part

_N = TypeVar("_N", bound=np.generic)

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
#: Prefix lengths in blocks; element i is slot i's.
Prefixes = NDArray[np.int32]
Scores = NDArray[np.float64]

#: Numbers per array of a view: address, rows, columns.
_PER_ARRAY: Final = 3


class Kind(NamedTuple):
    """The type of an array in a view, as native code expects it."""

    dtype: type[np.generic]
    ndim: int


WORDS: Final = Kind(np.uint64, 1)
WORD_ROWS: Final = Kind(np.uint64, 2)
INTS: Final = Kind(np.int64, 1)
INT_ROWS: Final = Kind(np.int64, 2)
PREFIX_ROWS: Final = Kind(np.int32, 2)
SCORE_LINE: Final = Kind(np.float64, 1)
SCORE_ROWS: Final = Kind(np.float64, 2)


class View:
    """Arrays of a fixed layout for native code, which is passed `addresses`. That array never moves, so views can be
    part of other views (as `INTS`)."""

    def __init__(self, layout: tuple[Kind, ...]) -> None:
        self._layout = layout
        self._arrays: tuple[NDArray[Any] | View, ...] = ()
        self.addresses: Ints = np.zeros(_PER_ARRAY * len(layout), np.int64)

    def show(self, *arrays: NDArray[Any] | View) -> None:
        """Set the arrays. Raises TypeError for one that does not match the layout or is not contiguous and writable."""
        numbers: list[int] = []
        for kind, part in zip(self._layout, arrays, strict=True):
            array = part.addresses if isinstance(part, View) else part
            if array.dtype != kind.dtype or array.ndim != kind.ndim or not array.flags.carray:
                raise TypeError(f"native code expects a contiguous array of {kind.ndim} x {kind.dtype.__name__}")
            numbers += (array.ctypes.data, array.shape[0], array.shape[1] if array.ndim == 2 else 1)
        self.addresses[:] = numbers
        self._arrays = arrays  # set after the addresses: the old arrays must not be freed before


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    return types.voidptr(types.int64), _to_pointer


def _to_pointer(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@compiled_part
def signed(number: np.generic) -> int:
    """Cast a number, bit by bit, to a signed 64-bit int."""
    return np.int64(number)  # type: ignore[return-value]  # to numba it is an int


@compiled_part
def line(view: Ints, number: int, dtype: type[_N]) -> NDArray[_N]:
    """Return a one-dimensional array of the view."""
    place = _PER_ARRAY * number
    return carray(_pointer(view[place]), view[place + 1], dtype)


@compiled_part
def rows(view: Ints, number: int, dtype: type[_N]) -> NDArray[_N]:
    """Return a two-dimensional array of the view."""
    place = _PER_ARRAY * number
    return carray(_pointer(view[place]), (view[place + 1], view[place + 2]), dtype)
