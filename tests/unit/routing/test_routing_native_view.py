"""Arrays exposed to native code stay in place and have the expected layout."""

import gc
import weakref

import numpy as np
import pytest

from medialane.core.compiled import compiled
from medialane.routing.native_view import INTS, SCORE_ROWS, WORD_ROWS, WORDS, Ints, View, line


@compiled
def total(view: Ints) -> int:
    found = 0
    for word in line(view, 0, np.uint64):
        found += word
    return found


class Shown(np.ndarray):
    """An array to which there can be weak references."""


def shown(values):
    return np.array(values, np.uint64).view(Shown)


def test_native_code_reads_the_current_arrays():
    view = View((WORDS,))
    addresses = view.addresses
    view.show(shown([1, 2]))
    assert total(view.addresses) == 3
    view.show(shown([5]))
    assert total(view.addresses) == 5
    assert view.addresses is addresses, "other views have its address"


def test_arrays_live_as_long_as_a_view_refers_to_them():
    array = shown(range(100))
    lives = weakref.ref(array)
    view, outer = View((WORDS,)), View((INTS,))
    view.show(array)
    outer.show(view)
    del array, view
    gc.collect()
    assert lives() is not None, "the outer view leads to it"
    del outer
    gc.collect()
    assert lives() is None


def test_unreferenced_array_is_freed():
    array = shown([1])
    lives = weakref.ref(array)
    view = View((WORDS,))
    view.show(array)
    view.show(shown([2]))
    del array
    assert lives() is None


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.int64),
        np.zeros(4, np.uint32),
        np.zeros((4, 2), np.uint64),
        np.zeros(8, np.uint64)[::2],
        np.frombuffer(bytes(32), np.uint64),
    ],
    ids=["signed", "narrow", "rows", "strided", "read-only"],
)
def test_array_of_wrong_layout_is_rejected(array):
    view = View((WORDS,))
    view.show(shown([7]))
    with pytest.raises(TypeError, match="contiguous"):
        view.show(array)
    assert total(view.addresses) == 7, "nothing has changed"


def test_every_array_of_the_layout_is_exposed():
    view = View((WORD_ROWS, SCORE_ROWS))
    with pytest.raises(ValueError, match="zip"):
        view.show(np.zeros((1, 1), np.uint64))
