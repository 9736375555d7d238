"""The front end's side of the zero-copy hand-over: items whose tensors EngineCore maps itself (see `arena_decoder`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

from medialane.types.tensor import TensorDescriptor
from medialane.vllm_bridge.items.arena_decoder import KEY, WireItem
from medialane.vllm_bridge.items.features import check_tensors, decode_item
from medialane.vllm_bridge.seams.engine import ItemEncoder

_ENCODER = msgspec.msgpack.Encoder()


class ArenaItem(MultiModalKwargsItem):  # type: ignore[misc]  # vllm is not typed
    """An item sent to EngineCore as the locations of its tensors. Decoded in this process only if its fields are
    accessed, which does not happen on the request path.

    `tensors` and their bytes are those that the header names, in its order; raises InvalidFeature if they do not match.
    """

    def __init__(self, header: bytes, tensors: Sequence[TensorDescriptor], datas: Sequence[memoryview]) -> None:
        # vLLM's own __init__ would fill `data`, which is lazy here.
        check_tensors(header, datas)
        self.wire = WireItem(header, tuple(tensors))
        self._datas = datas

    @cached_property
    def data(self) -> dict[str, MultiModalFieldElem]:
        return decode_item(self.wire.header, self._datas).data

    def __copy__(self) -> MultiModalKwargsItem:
        # UserDict's own accesses `__dict__["data"]`, which does not exist before first use.
        return MultiModalKwargsItem(self.data)


class ArenaEncoder(ItemEncoder):
    """vLLM's encoder; an `ArenaItem` is sent as its `WireItem`."""

    def encode_item(self, item: MultiModalKwargsItem) -> dict[str, Any]:
        if isinstance(item, ArenaItem):
            return {KEY: _ENCODER.encode(item.wire)}
        return super().encode_item(item)
