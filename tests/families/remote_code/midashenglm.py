"""A processor like MiDashengLM's: waveforms, padded to the longest of a request."""

from transformers import BatchFeature, PreTrainedTokenizerFast, ProcessorMixin, Wav2Vec2FeatureExtractor


class TinyProcessor(ProcessorMixin):
    audio_token, audio_bos_token, audio_eos_token = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"

    def __init__(self, feature_extractor=None, tokenizer=None):
        super().__init__(feature_extractor=feature_extractor, tokenizer=tokenizer)

    @classmethod
    def from_pretrained(cls, path, **_):
        extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
        return cls(extractor, PreTrainedTokenizerFast.from_pretrained(path))

    def __call__(self, text, audio=None, return_tensors="pt", **_):
        found = {"input_ids": [self.tokenizer.encode(text)]}
        if audio is not None:
            rate = self.feature_extractor.sampling_rate
            heard = self.feature_extractor(audio, sampling_rate=rate, padding=True, return_tensors="pt")
            found |= {"input_values": heard.input_values, "audio_length": heard.attention_mask.sum(-1)}
        return BatchFeature(found, tensor_type=return_tensors)
