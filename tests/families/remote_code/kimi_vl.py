"""A processor like Kimi-VL's: patches of an image that keeps its aspect ratio, padded to whole groups of four."""

import math

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

SIDE = 14


class TinyImageProcessor(BaseImageProcessor):
    patch_size = SIDE
    merge_kernel_size = (2, 2)

    def __init__(self, in_token_limit=256, **rest):
        super().__init__(**rest)
        self.in_token_limit = in_token_limit

    def preprocess(self, images, return_tensors="pt"):
        shaped = [self._padded(image) for image in images]
        grids = torch.tensor([[pixels.shape[1] // SIDE, pixels.shape[2] // SIDE] for pixels in shaped])
        found = {"pixel_values": torch.cat([_patches(pixels) for pixels in shaped]), "image_grid_hws": grids}
        return BatchFeature(found, tensor_type=return_tensors)

    def _padded(self, image):
        image, (width, height) = image.convert("RGB"), image.size
        num_patches = (width // SIDE) * (height // SIDE)
        if num_patches > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / num_patches)
            image = image.resize((int(width * scale), int(height * scale)))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
        return torch.nn.functional.pad(pixels, (0, -pixels.shape[2] % (2 * SIDE), 0, -pixels.shape[1] % (2 * SIDE)))


def _patches(pixels):
    return pixels.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).permute(1, 2, 0, 3, 4).reshape(-1, 3, SIDE, SIDE)


class TinyProcessor(ProcessorMixin):
    image_token = "<|media_pad|>"

    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text, images=None, return_tensors="pt", **_):
        found = {"input_ids": [self.tokenizer.encode(text)]}
        if images:
            found |= self.image_processor.preprocess(images)
        return BatchFeature(found, tensor_type=return_tensors)
