"""A processor like Phi-3-vision's: a small view of an image, and crops of one that keeps its aspect ratio on a canvas
of whole crops. Placeholders are numbered, and are text to the tokenizer."""

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

SIDE, MOST_CROPS = 336, 4


def _canvas(width, height):
    """Columns and rows of crops, and the size of the image on them."""
    wide, long = max(width, height), min(width, height)
    scale = 1
    while scale * -(-scale * long // wide) <= MOST_CROPS:
        scale += 1
    scale -= 1
    inner = int(scale * SIDE * long / wide)
    size, crops = (scale * SIDE, inner), (scale, -(-inner // SIDE))
    return (crops, size) if width >= height else (crops[::-1], size[::-1])


class TinyImageProcessor(BaseImageProcessor):
    def preprocess(self, images):
        views = [self._views(image.convert("RGB")) for image in images]
        sizes = [self._canvas_size(*image.size) for image in images]
        return {"pixel_values": torch.stack(views), "image_sizes": torch.tensor(sizes)}

    @staticmethod
    def _canvas_size(width, height):
        (columns, rows), _ = _canvas(width, height)
        return rows * SIDE, columns * SIDE

    @staticmethod
    def _views(image):
        (columns, rows), size = _canvas(*image.size)
        canvas = Image.new("RGB", (columns * SIDE, rows * SIDE), "white")
        canvas.paste(image.resize(size, Image.Resampling.BILINEAR), (0, (canvas.height - size[1]) // 2))
        boxes = [(x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE) for y in range(rows) for x in range(columns)]
        crops = [canvas.resize((SIDE, SIDE)), *map(canvas.crop, boxes)]
        pixels = torch.from_numpy(np.stack([np.asarray(crop) for crop in crops])).permute(0, 3, 1, 2) / 127.5 - 1
        return torch.nn.functional.pad(pixels, (0, 0, 0, 0, 0, 0, 0, MOST_CROPS + 1 - len(crops)))


class TinyProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)
        self.img_tokens = [f"<|image_{n}|>" for n in range(1, 1000)]

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def calc_num_image_tokens_from_image_size(self, width, height):
        (columns, rows), _ = _canvas(width, height)
        return (rows * columns + 1) * 144 + 1 + (rows + 1) * 12

    def __call__(self, text="", images=None, **_):
        found = {"input_ids": torch.tensor([self.tokenizer.encode(text)], dtype=torch.long)}
        if images:
            found |= self.image_processor.preprocess(images)
        return BatchFeature(found)
