"""Many arrays as one argument.

Handing an array to native code takes half a microsecond, and a whole decision has some ten. Structures whose arrays are
the same from call to call are handed over as a view: one array of their addresses and shapes, made anew when one of the
arrays is. Whoever makes a view keeps its arrays alive, and remakes it before it lets go of one: native code looks where
the view points.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from medialane.core.compiled import compiled_part

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
#: Prefix lengths in blocks; element i is slot i's.
Prefixes = NDArray[np.int32]

Scores = NDArray[np.float64]

#: Numbers of a view for each of its arrays: address, rows, columns.
_PER_ARRAY: Final = 3


def view_of(*arrays: NDArray[Any]) -> Ints:
    """A view of contiguous arrays of one or two dimensions. They must outlive it."""
    numbers: list[int] = []
    for array in arrays:
        assert array.flags.carray  # noqa: S101 - native code has no other way to see it
        numbers += (array.ctypes.data, array.shape[0], array.shape[1] if array.ndim == 2 else 1)
    return np.array(numbers, np.int64)


@intrinsic  # type: ignore[untyped-decorator]
def _words_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.uint64)(types.int64), _to_pointer


@intrinsic  # type: ignore[untyped-decorator]
def _ints_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.int64)(types.int64), _to_pointer


@intrinsic  # type: ignore[untyped-decorator]
def _scores_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.float64)(types.int64), _to_pointer


@intrinsic  # type: ignore[untyped-decorator]
def _prefixes_pointer(typing_context: Any, address: Any) -> Any:
    return types.CPointer(types.int32)(types.int64), _to_pointer


def _to_pointer(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@compiled_part
def signed(number: np.generic) -> int:
    """The same number, or bits, as a signed int of 64 bits."""
    return np.int64(number)  # type: ignore[return-value]  # to numba it is an int


@compiled_part
def words(view: Ints, number: int) -> Words:
    place = _PER_ARRAY * number
    return carray(_words_pointer(view[place]), view[place + 1])


@compiled_part
def word_rows(view: Ints, number: int) -> Words:
    place = _PER_ARRAY * number
    return carray(_words_pointer(view[place]), (view[place + 1], view[place + 2]))


@compiled_part
def ints(view: Ints, number: int) -> Ints:
    place = _PER_ARRAY * number
    return carray(_ints_pointer(view[place]), view[place + 1])


@compiled_part
def int_rows(view: Ints, number: int) -> Ints:
    place = _PER_ARRAY * number
    return carray(_ints_pointer(view[place]), (view[place + 1], view[place + 2]))


@compiled_part
def prefix_rows(view: Ints, number: int) -> Prefixes:
    place = _PER_ARRAY * number
    return carray(_prefixes_pointer(view[place]), (view[place + 1], view[place + 2]))


@compiled_part
def score_rows(view: Ints, number: int) -> Scores:
    place = _PER_ARRAY * number
    return carray(_scores_pointer(view[place]), (view[place + 1], view[place + 2]))


@compiled_part
def scores(view: Ints, number: int) -> Scores:
    place = _PER_ARRAY * number
    return carray(_scores_pointer(view[place]), view[place + 1])
