"""A tiny model of Whisper's family: an encoder for audio and a decoder that attends to its output."""

from __future__ import annotations

from pathlib import Path

from family import Family, written_by
from tiny_recipe import write_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from medialane.testing.tiny_model import SENTENCES

_END, _START = "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|prev|>", "<|nospeech|>", "<|notimestamps|>")
_WORDS = 384

#: One per 20 ms of a window of 30 s. The other special tokens precede them, as in the hub's checkpoints.
_TIMESTAMPS = tuple(f"<|{n * 0.02:.2f}|>" for n in range(1501))


def _tokenizer() -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    trained.add_special_tokens([_END, _START, *(f"<|{code}|>" for code in LANGUAGES), *_TASKS])
    # Not special: the text of a segment keeps them, and vLLM finds segments by them.
    trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TIMESTAMPS])
    return PreTrainedTokenizerFast(tokenizer_object=trained, bos_token=_END, eos_token=_END, pad_token=_END)


def write_whisper(folder: Path) -> None:
    words = _tokenizer()
    end, start = words.convert_tokens_to_ids([_END, _START])
    config = WhisperConfig(
        vocab_size=-(-len(words) // 64) * 64,
        d_model=64,
        num_mel_bins=80,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    # The head is tied to the embeddings: large ones would make the model repeat its last token.
    write_model(folder, WhisperForConditionalGeneration(config), embeddings=0.01)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=80), words).save_pretrained(folder)


FAMILIES = (
    # An encoder prompt beside the decoder's, no prefix cache, transcription instead of chat.
    Family(
        "whisper",
        {"audio": 1},
        {"audio": ""},
        written_by(write_whisper, __file__),
        extra_flags=("--max-model-len=448",),
        has_encoder_prompt=True,
    ),
)
