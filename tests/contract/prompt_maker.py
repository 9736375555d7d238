"""Requests as a gateway sends them, built without a gateway."""

import msgspec
import numpy as np
from PIL import Image as PILImage
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from medialane.arena import describe, layout
from medialane.types.feature import Feature, MediaPayload
from medialane.types.media import Image
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.vllm_bridge.items import VllmProcessor
from medialane.vllm_bridge.learned import VllmAssembler

PART = "<|vision_start|><|image_pad|><|vision_end|>"


def pixels(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(**params):
    """Encoded sampling parameters; greedy and streaming by default."""
    defaults = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return bytes(MsgpackEncoder().encode(SamplingParams(**(defaults | params)))[0])


def request(request_id, prompt, **params):
    return EngineRequest(request_id, prompt, encoded(**params))


class PromptMaker:
    """Processes images and expands prompts with the halves of vLLM's processor that preparers and gateway run."""

    def __init__(self, renderer):
        self.tokenizer = renderer.tokenizer
        self.processor = VllmProcessor(renderer.get_mm_processor())
        self.assembler = VllmAssembler(renderer.get_mm_processor())

    def token_ids(self, num_images):
        text = f"<|im_start|>user\nlook {' and '.join([PART] * num_images)}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(text)

    def inline(self, *arrays, options=b"{}"):
        """A prompt with the features of these pixels by value."""
        return self._expanded(arrays, options, self.by_value)

    def in_arena(self, arena, *arrays):
        """A prompt with descriptors, and the pins that pin its entries."""
        pins = []

        def put(item, key):
            reservation = arena.reserve(layout(item.specs)[1])
            tensors = describe(reservation.range, item.specs)
            for tensor, data in zip(tensors, item.buffers, strict=True):
                arena.view.tensor(tensor, writable=True)[:] = data
            pins.append(arena.publish(reservation, key, Feature("image", key, item.header, tensors, item.size)))
            return tensors

        return self._expanded(arrays, b"{}", put), pins

    def _expanded(self, arrays, options, put):
        items = [self.processor.process(Image(a), options) for a in arrays]
        keys = [f"{int(a.astype(np.int64).sum()):064x}" for a in arrays]
        features = tuple(Feature("image", k, i.header, (), i.size) for k, i in zip(keys, items, strict=True))
        assembled = self.assembler.assemble(self.token_ids(len(arrays)), features, options)
        handed = [
            MediaPayload("image", key, item.header, put(item, key), item.size, place)
            for key, item, place in zip(keys, items, assembled.placeholders, strict=True)
        ]
        return ExpandedPrompt(assembled.token_ids, tuple(handed), options)

    @staticmethod
    def by_value(item, _key):
        return tuple(InlineTensor(s, bytes(b)) for s, b in zip(item.specs, item.buffers, strict=True))


def bytes_of(prompt):
    """The tensors of an inline prompt, as `Engine.generate` accepts them."""
    return [[memoryview(t.data) for t in item.tensors] for item in prompt.media]


def encoded_item(data, mm_hash):
    """An item of stage `url`: its encoded bytes by value."""
    return MediaPayload("image", mm_hash, b"", (InlineTensor(TensorSpec("uint8", (len(data),)), data),))


def plain(token_ids, *arrays):
    """The same request for vLLM's own `AsyncLLM.generate`."""
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [PILImage.fromarray(a) for a in arrays]}}


def with_feature(prompt, index=0, **changes):
    """The prompt with one feature changed."""
    features = list(prompt.features)
    features[index] = msgspec.structs.replace(features[index], **changes)
    return msgspec.structs.replace(prompt, features=tuple(features))
