from typing import Annotated

import msgspec
import pytest

from medialane.core.errors import StartupFailed
from medialane.core.numbers import check_numbers


class Limits(msgspec.Struct, frozen=True):
    size: Annotated[int, msgspec.Meta(description="")] = 1
    rate: float = 1.0
    folder: str | None = None
    is_on: bool = False


@pytest.mark.parametrize("setting", [{"size": 0}, {"size": -1}, {"rate": 0.0}, {"rate": float("nan")}], ids=str)
def test_number_that_is_not_positive_is_named(setting):
    (name,) = setting
    with pytest.raises(StartupFailed, match=f"{name} must be positive"):
        check_numbers(Limits(**setting))


def test_zero_is_valid_only_where_allowed_and_negative_nowhere():
    check_numbers(Limits(size=0), may_be_zero=("size",))
    with pytest.raises(StartupFailed, match="size must not be negative"):
        check_numbers(Limits(size=-1), may_be_zero=("size",))
    with pytest.raises(StartupFailed, match="rate must be positive"):
        check_numbers(Limits(rate=0), may_be_zero=("size",))


def test_other_settings_are_not_numbers():
    check_numbers(Limits(folder="", is_on=False))
