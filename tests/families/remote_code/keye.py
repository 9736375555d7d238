"""A processor like Keye's: patches of images and of single frames, row by row."""

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from vllm.model_executor.models.keye import smart_resize

SIDE = 14


class TinyImageProcessor(BaseImageProcessor):
    patch_size = SIDE
    merge_size = 2

    def __init__(self, **rest):
        super().__init__(**rest)
        self.size = {"min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}

    def patches(self, frames):
        """Patches of all frames, and their grid."""
        height, width = frames[0].shape[:2]
        height, width = smart_resize(height, width, factor=2 * SIDE, **self.size)
        shaped = np.stack([np.asarray(Image.fromarray(frame).resize((width, height))) for frame in frames])
        rows, columns = height // SIDE, width // SIDE
        split = shaped.reshape(len(frames), rows, SIDE, columns, SIDE, 3).transpose(0, 1, 3, 5, 2, 4)
        return torch.from_numpy(split.reshape(-1, 3, SIDE, SIDE)) / 127.5 - 1, (len(frames), rows, columns)


class TinyProcessor(ProcessorMixin):
    image_token, video_token = "<|image_pad|>", "<|video_pad|>"

    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text, images=(), videos=(), **_):
        found = {"input_ids": torch.tensor([self.tokenizer.encode(text)])}
        for name, grid, items in (
            ("pixel_values", "image_grid_thw", [[np.asarray(image.convert("RGB"))] for image in images]),
            ("pixel_values_videos", "video_grid_thw", [list(video) for video in videos]),
        ):
            if items:
                made = [self.image_processor.patches(frames) for frames in items]
                found[name] = torch.cat([patches for patches, _ in made])
                found[grid] = torch.tensor([shape for _, shape in made])
        return BatchFeature(found)
