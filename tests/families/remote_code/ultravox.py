"""A processor like Ultravox's: chunks of 30 s of Mel frames; eight encoded frames are one token."""

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin, WhisperFeatureExtractor

CHUNK_FRAMES = 3000
FRAMES_PER_TOKEN = 16


class TinyProcessor(ProcessorMixin):
    def __init__(self, audio_processor=None, tokenizer=None):
        self.audio_token_replacement = tokenizer.eos_token
        super().__init__(audio_processor=audio_processor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(WhisperFeatureExtractor.from_pretrained(path), PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(
        self, text, audios=(), sampling_rate=None, return_tensors="pt", include_audio_num_chunks=False, **rest
    ):
        found = {"input_ids": [self.tokenizer.encode(text)]}
        if len(audios):
            found |= self._chunks(audios, sampling_rate, **rest)
        if not include_audio_num_chunks:
            found.pop("audio_num_chunks", None)
        return BatchFeature(found, tensor_type=return_tensors)

    def _chunks(self, audios, sampling_rate, **rest):
        hop = self.audio_processor.hop_length
        heard = self.audio_processor(
            [np.pad(audio, (0, max(0, 2 * hop - len(audio)))) for audio in audios],
            sampling_rate=sampling_rate,
            padding="longest",
            pad_to_multiple_of=hop,
            truncation=False,
            return_attention_mask=True,
            **rest,
        )
        chunks, lengths, counts = [], [], []
        for frames, mask in zip(heard.input_features, heard.attention_mask, strict=True):
            length = int(mask.sum())
            starts = range(0, length, CHUNK_FRAMES)
            counts.append(len(starts))
            for start in starts:
                chunk = torch.as_tensor(frames[:, start : start + CHUNK_FRAMES])
                chunks.append(torch.nn.functional.pad(chunk, (0, CHUNK_FRAMES - chunk.shape[1] if start else 0)))
                lengths.append(min(length - start, CHUNK_FRAMES))
        return {
            "audio_values": torch.stack(chunks),
            "audio_lens": torch.tensor(lengths),
            "audio_token_len": -(torch.tensor(lengths) // -FRAMES_PER_TOKEN),
            "audio_num_chunks": torch.tensor(counts),
        }
