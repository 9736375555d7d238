import math

import msgspec
import pytest

from medialane.types.errors import StartupFailed
from medialane.types.setting import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_bounds,
    descriptions,
)


class Example(msgspec.Struct):
    """Not the description of a field."""

    num_items: PositiveInt = 1
    """most items"""
    num_retries: NonNegativeInt = 0
    """most retries,
    of any kind"""
    timeout_s: PositiveFloat = 1.0
    pause_s: NonNegativeFloat = 0.0
    offset: int = -1
    """any number"""

    def validate(self) -> None:
        """Not a description either."""


def test_limits_of_the_bounds_are_valid():
    check_bounds(Example())
    check_bounds(Example(timeout_s=1e-9))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_items", 0, "num_items must be at least 1"),
        ("num_retries", -1, "num_retries must not be negative"),
        ("timeout_s", 0.0, "timeout_s must be positive"),
        ("pause_s", -0.1, "pause_s must not be negative"),
        ("timeout_s", math.nan, "timeout_s must be positive"),
        ("pause_s", math.nan, "pause_s must not be negative"),
    ],
)
def test_value_outside_its_bounds_is_named(name, value, message):
    with pytest.raises(StartupFailed, match=message):
        check_bounds(Example(**{name: value}))


def test_description_is_the_docstring_below_a_field():
    expected = {"num_items": "most items", "num_retries": "most retries, of any kind", "offset": "any number"}
    assert descriptions(Example) == expected
