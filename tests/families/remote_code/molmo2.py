"""A processor like Molmo2's: a small view of an image and overlapping crops of a large one, whose patches are pooled
by four; frames with their times as text. Which patches a token pools is a field of its own."""

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from vllm.model_executor.models.molmo2 import select_tiling

SIDE = 14
#: Patches of a crop, and those at each end that it shares with its neighbour.
CROP, MARGIN = 8, 1
WINDOW = CROP - 2 * MARGIN


class Molmo2ImageProcessor(BaseImageProcessor):
    patch_size = SIDE
    pooling_size = (2, 2)
    overlap_margins = (MARGIN, MARGIN)
    max_crops = 4

    def __init__(self, **rest):
        super().__init__(**rest)
        self.size = {"height": CROP * SIDE, "width": CROP * SIDE}

    def preprocess(self, images):
        views = [self._views(image.convert("RGB")) for image in images]
        return {
            "pixel_values": torch.cat([pixels for pixels, _, _ in views]),
            "image_token_pooling": torch.cat([pooling for _, pooling, _ in views]),
            "image_grids": torch.tensor([grid for _, _, grid in views]),
            "image_num_crops": torch.tensor([len(pixels) for pixels, _, _ in views]),
        }

    def _views(self, image):
        width, height = image.size
        margins = 2 * MARGIN * SIDE
        rows, columns = select_tiling(
            height=height - margins, width=width - margins, patch_size=WINDOW * SIDE, max_num_patches=self.max_crops
        ).tolist()
        large = _pixels(image, (columns * WINDOW + 2 * MARGIN) * SIDE, (rows * WINDOW + 2 * MARGIN) * SIDE)
        starts = [(row * WINDOW * SIDE, column * WINDOW * SIDE) for row in range(rows) for column in range(columns)]
        side = CROP * SIDE
        crops = [large[top : top + side, left : left + side] for top, left in starts]
        crops.insert(0, _pixels(image, side, side))
        small, whole = pooled(np.arange(CROP * CROP).reshape(CROP, CROP)), pooled(_patches_of_crops(rows, columns))
        pooling = np.concatenate([small.reshape(-1, 4), whole.reshape(-1, 4)])
        return patches(np.stack(crops)), torch.from_numpy(pooling), [*small.shape[:2], *whole.shape[:2]]


class Molmo2VideoProcessor(BaseImageProcessor):
    patch_size = SIDE
    pooling_size = (2, 2)
    num_frames = 8
    frame_sample_mode = "uniform_last_frame"
    max_fps = 2
    sampling_fps = 2

    def __init__(self, **rest):
        super().__init__(**rest)
        self.size = {"height": CROP * SIDE, "width": CROP * SIDE}

    def preprocess(self, frames):
        pixels = np.stack([_pixels(Image.fromarray(frame), CROP * SIDE, CROP * SIDE) for frame in frames])
        grid = pooled(np.arange(CROP * CROP).reshape(CROP, CROP))
        pooling = np.concatenate([grid.reshape(-1, 4) + n * CROP * CROP for n in range(len(frames))])
        return {
            "pixel_values_videos": patches(pixels),
            "video_token_pooling": torch.from_numpy(pooling),
            "video_grids": torch.tensor([[len(frames), *grid.shape[:2]]]),
        }


def _pixels(image, width, height):
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.float32) / 127.5 - 1


def _patches_of_crops(rows, columns):
    """The patch of each place of the large image, counted over the small view and all crops."""
    found = np.zeros((rows * WINDOW + 2 * MARGIN, columns * WINDOW + 2 * MARGIN), np.int64)
    for n in range(rows * columns):
        row, column = divmod(n, columns)
        ids = np.arange(CROP * CROP).reshape(CROP, CROP) + (n + 1) * CROP * CROP
        top, left = (MARGIN if row else 0), (MARGIN if column else 0)
        place = (slice(row * WINDOW + top, row * WINDOW + CROP), slice(column * WINDOW + left, column * WINDOW + CROP))
        found[place] = ids[top:, left:]
    return found


def pooled(grid):
    rows, columns = grid.shape
    padded = np.pad(grid, ((0, rows % 2), (0, columns % 2)), constant_values=-1)
    return (
        padded.reshape(-(-rows // 2), 2, -(-columns // 2), 2).swapaxes(1, 2).reshape(-(-rows // 2), -(-columns // 2), 4)
    )


def patches(pixels):
    count = len(pixels)
    split = pixels.reshape(count, CROP, SIDE, CROP, SIDE, 3).swapaxes(2, 3)
    return torch.from_numpy(split.reshape(count, CROP * CROP, SIDE * SIDE * 3))


class Molmo2Processor(ProcessorMixin):
    image_use_col_tokens = True
    use_single_crop_col_tokens = None
    use_single_crop_start_token = True
    video_use_col_tokens = False
    use_frame_special_tokens = True

    def __init__(self, image_processor=None, tokenizer=None):
        self.video_processor = Molmo2VideoProcessor()
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(Molmo2ImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text="", images=None, videos=None, **_):
        found = {}
        if images:
            found |= self.image_processor.preprocess(images)
        if videos:
            ((frames,),) = videos
            found |= self.video_processor.preprocess(frames)
        # Placeholders stay as they are: vLLM expands them.
        found["input_ids"] = torch.tensor([[self.tokenizer.bos_token_id, *self.tokenizer.encode(text or "")]])
        return BatchFeature(found)


TinyProcessor = Molmo2Processor
