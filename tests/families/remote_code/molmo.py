"""A processor like Molmo's: a small view of an image and overlapping crops of a large one, at the start of a prompt
that it tokenizes by itself. A field has the position in the prompt of each group of four patches."""

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from vllm.model_executor.models.molmo import select_tiling

SIDE, CROP, MARGIN = 14, 24, 4
WINDOW = CROP - 2 * MARGIN
TOKENS = CROP // 2


class TinyImageProcessor(BaseImageProcessor):
    max_crops = 4
    overlap_margins = (MARGIN, MARGIN)
    base_image_input_size = (CROP * SIDE, CROP * SIDE)
    image_token_length_w = image_token_length_h = TOKENS
    image_patch_size = SIDE

    def preprocess(self, images):
        views = [self._crops(image.convert("RGB")) for image in images]
        pixels = torch.cat([pixels for pixels, _ in views])
        places = torch.cat([places for _, places in views])
        return {"images": pixels, "image_masks": torch.ones(pixels.shape[:2]), "image_input_idx": places}

    def _crops(self, image):
        margins = 2 * MARGIN * SIDE
        rows, columns = select_tiling(
            height=image.height - margins,
            width=image.width - margins,
            patch_size=WINDOW * SIDE,
            max_num_patches=self.max_crops,
        ).tolist()
        large = _pixels(image, columns * WINDOW * SIDE + margins, rows * WINDOW * SIDE + margins)
        crops, places = [_pixels(image, CROP * SIDE, CROP * SIDE)], [_rows_of(TOKENS, TOKENS, start=2)]
        grid = _rows_of(_num_tokens(rows), _num_tokens(columns), start=2 + TOKENS * (TOKENS + 1) + 2)
        for row in range(rows):
            for column in range(columns):
                top, left = row * WINDOW * SIDE, column * WINDOW * SIDE
                crops.append(large[top : top + CROP * SIDE, left : left + CROP * SIDE])
                own = np.full((TOKENS, TOKENS), -1)
                down, across = _kept(row, rows), _kept(column, columns)
                first = (row * WINDOW // 2, column * WINDOW // 2)
                own[np.ix_(down, across)] = grid[np.ix_(down + first[0], across + first[1])]
                places.append(own)
        split = np.stack(crops).reshape(len(crops), CROP, SIDE, CROP, SIDE, 3).swapaxes(2, 3)
        patches = split.reshape(len(crops), CROP * CROP, SIDE * SIDE * 3)
        return torch.from_numpy(patches), torch.from_numpy(np.stack(places).reshape(len(crops), -1))


def _pixels(image, width, height):
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32) / 127.5 - 1


def _num_tokens(num_crops):
    return (num_crops * WINDOW + 2 * MARGIN) // 2


def _kept(n, num_crops):
    """Tokens of a crop that are not its neighbour's."""
    return np.arange(MARGIN // 2 if n else 0, TOKENS if n == num_crops - 1 else TOKENS - MARGIN // 2)


def _rows_of(rows, columns, start):
    """Positions of tokens in rows, each with a mark at its end."""
    return start + np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)


class TinyProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def get_tokens_input(self, prompt, message_format, always_start_with_space):
        text = prompt if message_format == "none" else f"User: {prompt} Assistant:"
        return self.tokenizer.encode(" " + text if always_start_with_space else text, add_special_tokens=False)

    def process(self, text="", images=None, tokens=None, **_):
        if tokens is None:
            tokens = self.get_tokens_input(text, "role", always_start_with_space=True)
        found = {"input_ids": torch.tensor([self.tokenizer.bos_token_id, *tokens])}
        return found | (self.image_processor.preprocess(images) if images else {})
