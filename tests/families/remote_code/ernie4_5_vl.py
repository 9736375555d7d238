"""A processor like Ernie-4.5-VL's: patches of images and of frames in one field, before they are normalised, which are
told from each other by their grids; a video has an even number of frames."""

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from vllm.model_executor.models.ernie45_vl import smart_resize

SIDE, MERGED = 14, 2


class TinyImageProcessor(BaseImageProcessor):
    image_mean = (0.48, 0.46, 0.41)
    image_std = (0.27, 0.26, 0.28)
    rescale_factor = 1 / 255

    def __init__(self, **rest):
        super().__init__(**rest)
        self.size = {"min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}

    def patches(self, frames):
        """Patches of all frames in groups of four, and their grid."""
        height, width = frames[0].shape[:2]
        sizes = {f"{end}_pixels": self.size[f"{end}_pixels"] for end in ("min", "max")}
        height, width = smart_resize(height, width, factor=SIDE * MERGED, **sizes)
        shaped = np.stack([np.asarray(Image.fromarray(frame).resize((width, height))) for frame in frames])
        grid = (len(shaped), height // SIDE, width // SIDE)
        split = shaped.reshape(grid[0], grid[1] // 2, 2, SIDE, grid[2] // 2, 2, SIDE, 3)
        return split.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3 * SIDE * SIDE), grid


class TinyProcessor(ProcessorMixin):
    spatial_conv_size = temporal_conv_size = 2

    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text, images=(), videos=(), **_):
        made = [self.image_processor.patches([np.asarray(image.convert("RGB"))]) for image in images]
        for video in videos:
            frames = list(video)
            made.append(self.image_processor.patches(frames + frames[-1:] * (len(frames) % 2)))
        found = {"input_ids": torch.tensor([self.tokenizer.encode("".join(text))]), "images": None, "grid_thw": None}
        if made:
            found["images"] = torch.from_numpy(np.concatenate([patches for patches, _ in made]))
            found["grid_thw"] = torch.tensor([grid for _, grid in made])
        return BatchFeature(found)
