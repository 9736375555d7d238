"""A processor like MiniCPM-V's from 2.6 on: a small view of an image, and slices of a large one in a grid, each with as
many tokens as any other. An image's number is part of its text. Only images' processor is used by vLLM."""

import math

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

SIDE = 14


class TinyImageProcessor(BaseImageProcessor):
    im_id_start, im_id_end = "<image_id>", "</image_id>"
    image_feature_size = 16

    def __init__(self, max_slice_nums=4, scale_resolution=112, **rest):
        super().__init__(**rest)
        self.max_slice_nums = max_slice_nums
        self.scale_resolution = scale_resolution

    def get_sliced_grid(self, image_size, max_slice_nums):
        width, height = image_size
        num_slices = min(math.ceil(width * height / self.scale_resolution**2), max_slice_nums)
        if num_slices <= 1:
            return None
        counts = [count for count in range(num_slices - 1, num_slices + 2) if 1 < count <= max_slice_nums]
        grids = [(n, count // n) for count in counts for n in range(1, count + 1) if count % n == 0]
        return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True):
        embeddings = "<unk>" * self.image_feature_size
        columns, rows = self.get_sliced_grid(image_size, max_slice_nums or self.max_slice_nums) or (0, 0)
        number = f"{self.im_id_start}{image_idx}{self.im_id_end}" if use_image_id else ""
        lines = [f"<slice>{embeddings}</slice>" * columns] * rows
        return f"{number}<image>{embeddings}</image>" + "\n".join(lines)

    def preprocess(self, images, do_pad=True, max_slice_nums=None, return_tensors=None):
        made = [[self._slices(image, max_slice_nums) for image in some] for some in images]
        found = {
            "pixel_values": [[_patches(pixels) for slices in some for pixels in slices] for some in made],
            "image_sizes": [[image.size for image in some] for some in map(_pictures, images)],
            "tgt_sizes": [torch.tensor([_grid(pixels) for slices in some for pixels in slices]) for some in made],
        }
        return BatchFeature(found)

    def _slices(self, image, max_slice_nums):
        (image,) = _pictures([image])
        grid = self.get_sliced_grid(image.size, max_slice_nums or self.max_slice_nums)
        slices = [image.resize(self._fitting(*image.size))]
        if grid:
            width, height = self._fitting(image.width / grid[0], image.height / grid[1])
            large = image.resize((width * grid[0], height * grid[1]))
            corners = [(x * width, y * height) for y in range(grid[1]) for x in range(grid[0])]
            slices += [large.crop((x, y, x + width, y + height)) for x, y in corners]
        return [torch.from_numpy(np.array(part)).permute(2, 0, 1) / 127.5 - 1 for part in slices]

    def _fitting(self, width, height):
        scale = self.scale_resolution / math.sqrt(width * height)
        return tuple(max(round(length * scale / SIDE), 1) * SIDE for length in (width, height))


def _pictures(images):
    """Frames of videos are arrays."""
    return [Image.fromarray(image) if isinstance(image, np.ndarray) else image.convert("RGB") for image in images]


def _grid(pixels):
    return pixels.shape[1] // SIDE, pixels.shape[2] // SIDE


def _patches(pixels):
    """All patches in one row."""
    return pixels.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).permute(0, 3, 1, 2, 4).reshape(3, SIDE, -1)


class TinyProcessor(ProcessorMixin):
    def __init__(self, tokenizer=None):
        super().__init__(tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(PreTrainedTokenizerFast.from_pretrained(path))
