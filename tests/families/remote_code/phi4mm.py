"""A processor like Phi-4-multimodal's: crops of an image that keeps its aspect ratio, with a mask of what is the image;
a spectrum of audio. As many crops as the request's largest image has, as many frames as its longest clip."""

import math

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin, SequenceFeatureExtractor
from transformers.image_processing_utils import BaseImageProcessor

SIDE, PATCH = 448, 14
PATCHES = SIDE // PATCH
WINDOW, HOP, BINS = 400, 160, 80


class TinyImageProcessor(BaseImageProcessor):
    def __init__(self, dynamic_hd=4, **rest):
        super().__init__(**rest)
        self.dynamic_hd = dynamic_hd

    def find_closest_aspect_ratio(self, aspect_ratio, target_ratios, width, height, image_size):
        def rank(ratio):
            wants_more = width * height > 0.5 * image_size**2 * ratio[0] * ratio[1]
            return abs(aspect_ratio - ratio[0] / ratio[1]), -ratio[0] * ratio[1] if wants_more else 0

        return min(target_ratios, key=rank)

    def preprocess(self, images):
        made = [self._crops(image.convert("RGB")) for image in images]
        most = max(len(crops) for crops, _, _ in made)
        return {
            "input_image_embeds": torch.stack([_padded(crops, most) for crops, _, _ in made]),
            "image_attention_mask": torch.stack([_padded(mask, most, 1.0) for _, mask, _ in made]),
            "image_sizes": torch.tensor([size for _, _, size in made]),
        }

    def _crops(self, image):
        columns, rows = self._grid(*image.size)
        scale = min(columns * SIDE / image.width, rows * SIDE / image.height)
        if columns * SIDE / image.width < rows * SIDE / image.height:
            size = (columns * SIDE, int(image.height * scale))
        else:
            size = (int(image.width * scale), rows * SIDE)
        pixels = torch.from_numpy(np.array(image.resize(size))).permute(2, 0, 1) / 127.5 - 1
        padding = (columns * SIDE - size[0], rows * SIDE - size[1])
        pixels = torch.nn.functional.pad(pixels, (0, padding[0], 0, padding[1]), value=1.0)
        mask = torch.ones(rows * PATCHES, columns * PATCHES)
        mask[:, mask.shape[1] - padding[0] // PATCH :] = 0
        mask[mask.shape[0] - padding[1] // PATCH :] = 0
        small = torch.nn.functional.interpolate(pixels[None], size=(SIDE, SIDE), mode="bicubic")
        crops = pixels.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).permute(1, 2, 0, 3, 4).reshape(-1, 3, SIDE, SIDE)
        masks = mask.unfold(0, PATCHES, PATCHES).unfold(1, PATCHES, PATCHES).reshape(-1, PATCHES, PATCHES)
        whole = torch.ones(1, PATCHES, PATCHES)
        return torch.cat([small, crops]), torch.cat([whole, masks]), (rows * SIDE, columns * SIDE)

    def _grid(self, width, height):
        grid = (math.ceil(width / SIDE), math.ceil(height / SIDE))
        if grid[0] * grid[1] <= self.dynamic_hd:
            return grid
        sizes = range(1, self.dynamic_hd + 1)
        grids = sorted(((i, j) for i in sizes for j in sizes if i * j <= self.dynamic_hd), key=lambda g: g[0] * g[1])
        return self.find_closest_aspect_ratio(width / height, grids, width, height, SIDE)


def _padded(tensor, length, value=0.0):
    return torch.cat([tensor, torch.full((length - len(tensor), *tensor.shape[1:]), value)])


class TinyFeatureExtractor(SequenceFeatureExtractor):
    def __init__(self):
        super().__init__(feature_size=BINS, sampling_rate=16000, padding_value=0.0)

    def __call__(self, audios):
        frames = [self._spectrum(torch.as_tensor(samples, dtype=torch.float32)) for samples, _ in audios]
        return {"input_audio_embeds": torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)}

    @staticmethod
    def _spectrum(samples):
        windows = samples.unfold(0, WINDOW, HOP) * torch.hann_window(WINDOW)
        return torch.fft.rfft(windows).abs()[:, :BINS].clamp(min=1e-5).log()


class TinyProcessor(ProcessorMixin):
    def __init__(self, image_processor=None, tokenizer=None):
        self.audio_processor = TinyFeatureExtractor()
        super().__init__(image_processor=image_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(TinyImageProcessor(), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text="", images=None, audios=None, **_):
        found = {"input_ids": torch.tensor([self.tokenizer.encode(text)], dtype=torch.long)}
        if images:
            found |= self.image_processor.preprocess(images)
        if audios:
            found |= self.audio_processor(audios)
        found.setdefault("image_sizes", torch.empty(0, 2, dtype=torch.long))
        return BatchFeature(found)
