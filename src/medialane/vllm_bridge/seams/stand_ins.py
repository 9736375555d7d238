"""Tensors of a known dtype and shape without values, for code that must not depend on the values.

Theory of operation. A stand-in takes part in any operation, and its result is a stand-in. Whatever needs values raises:
conversion to numbers or an array, a shape that depends on them, and writing them to a real tensor. So a result computed
from stand-ins is either the real tensors' result, or an exception; never a wrong one. Zeros would give wrong ones, and
torch's own `meta` tensors do in places (`real[meta > 0] = 1` does nothing). Shapes are computed by `meta` tensors; a
stand-in appears to be on the CPU, so that it can be batched with real tensors. A tensor subclass needs names of torch
that are documented, but private.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map  # torch has no public name for it


class ValueUnknown(RuntimeError):
    """The value of a stand-in was needed."""


class StandIn(torch.Tensor):
    """A tensor without values; `meta` has its dtype and shape. Made by `stand_in_for`."""

    meta: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls) for leaf in _written(func, args, given)):
            raise ValueUnknown(f"{func} would write a value that is unknown here")
        try:
            result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, given))
        except RuntimeError as error:
            raise ValueUnknown(f"{func} needs a value that is unknown here") from error
        return tree_map(_from_meta, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not typed
        return f"StandIn({self.dtype}, {tuple(self.shape)})"

    def __dlpack__(self, **_: Any) -> Any:
        raise ValueUnknown("a stand-in has no memory")


def stand_in_for(dtype: torch.dtype, shape: Sequence[int]) -> Any:
    return _from_meta(torch.empty(tuple(shape), dtype=dtype, device="meta"))


def _from_meta(tensor: Any) -> Any:
    """Return a result of `meta` tensors as a stand-in; other values as they are."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    stand_in = torch.Tensor._make_wrapper_subclass(
        StandIn, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu")
    )
    stand_in.meta = tensor
    return stand_in


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    places = [
        (n, arg.name) for n, arg in enumerate(func._schema.arguments) if arg.alias_info and arg.alias_info.is_write
    ]
    return tree_flatten([args[n] if n < len(args) else kwargs.get(name) for n, name in places])[0]


def stand_ins_like(data: Any) -> Any:
    """Return nested tensors as stand-ins."""
    return tree_map(lambda leaf: _from_meta(_to_meta(leaf)), data)


def has_stand_in(data: Any) -> bool:
    return any(isinstance(leaf, StandIn) for leaf in tree_flatten(data)[0])


def _to_meta(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.meta
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value
