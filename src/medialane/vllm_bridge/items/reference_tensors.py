"""The tensors of an item as others make them: plain vLLM from the encoded file, Hugging Face's processor as a trainer.

Theory of operation. Plain vLLM loads the file by its own connector and processes a whole request with this item. A
trainer passes Hugging Face's processor the image as Pillow opens it, whatever its mode. Which frames of a video are
sampled and how audio is resampled is decided by whoever loads the file, so of these Hugging Face gets what vLLM passes
to its processor: frames with their metadata, samples at the model's rate. Its arguments are named in several ways;
they are tried in turn.
"""

from __future__ import annotations

import io
import logging
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from PIL import Image as PILImage
from transformers import AutoProcessor, PreTrainedTokenizerBase
from vllm.config import ModelConfig
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.errors import FeatureUnsupported
from medialane.types.media import Decoded, Modality
from medialane.vllm_bridge.items.mistral_chat import expand_marks
from medialane.vllm_bridge.items.preparation import engine_media
from medialane.vllm_bridge.items.stage_fitness import process_one
from medialane.vllm_bridge.items.trial_items import attempt, without_warnings
from medialane.vllm_bridge.seams.reference_tensors import load_as_plain

logger = logging.getLogger(__name__)

#: What transformers knows of a video's metadata.
_METADATA = ("total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices")


class PlainVllm:
    """Processes files as plain vLLM does. `processor` is a new one of the model."""

    def __init__(self, model_config: ModelConfig, processor: BaseMultiModalProcessor) -> None:
        self._config = model_config
        self._processor = processor
        expand_marks(processor)

    def load(self, modality: Modality, data: bytes) -> Any:
        """Return what vLLM's connector makes of a file."""
        return load_as_plain(self._config, modality, f"data:;base64,{b64encode(data).decode()}")

    def process(self, modality: Modality, loaded: Any) -> Mapping[str, Any]:
        """Return the fields of the item, by name."""
        return _fields(process_one(self._processor, modality, loaded), modality)

    def process_decoded(self, media: Decoded) -> Mapping[str, Any]:
        """Return the fields of an item that we have decoded, as a worker makes them (stage `decoded`)."""
        return self.process(media.modality, engine_media(media))


def _fields(whole: Any, modality: Modality) -> Mapping[str, Any]:
    (item,) = whole["mm_kwargs"][modality]
    return {name: elem.data for name, elem in item.items()}


class HuggingFace:
    """The processor that `AutoProcessor` loads for the model. `processor` is vLLM's."""

    def __init__(self, model_config: ModelConfig, processor: BaseMultiModalProcessor) -> None:
        self._config = model_config
        self._processor = processor

    @cached_property
    def own(self) -> Any:
        """Hugging Face's processor. Raises what `AutoProcessor` raises, such as for a model that has none."""
        config = self._config
        options = config.multimodal_config.mm_processor_kwargs or {}
        loaded = AutoProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code, **options
        )
        if isinstance(loaded, PreTrainedTokenizerBase):
            raise FeatureUnsupported("for this model AutoProcessor has a tokenizer only")
        return loaded

    @without_warnings()
    def process(self, modality: Modality, data: bytes, loaded: Any) -> Mapping[str, Any]:
        """Return the fields of the item, by name. `loaded` is what vLLM has made of the file. Raises the first error if
        the processor accepts it in no form."""
        errors = []
        for media in self._media(modality, data, loaded):
            for text in self._texts(modality):
                made = attempt(self._call, {**text, **media})
                if not isinstance(made, Exception):
                    return made
                errors.append(made)
        raise errors[0]

    def _call(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(self.own(**arguments, return_tensors="pt"))

    def _media(self, modality: Modality, data: bytes, loaded: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the arguments for the item, the best first."""
        if modality == "image":
            yield {"images": [PILImage.open(io.BytesIO(data))]}
            return
        parsed = self._processor.info.parse_mm_data({modality: [loaded]})[modality].get(0)
        if modality == "audio":
            rate = _sampling_rate(self.own)
            yield {"audio": [parsed], **rate}
            yield {"audio": parsed, **rate}
            yield {"audios": [parsed], **rate}
            return
        frames, metadata = parsed if isinstance(parsed, tuple) else (parsed, {})
        known = {name: metadata[name] for name in _METADATA if metadata.get(name) is not None}
        yield {"videos": [frames], "video_metadata": [known], "do_sample_frames": False}
        yield {"videos": [frames], "do_sample_frames": False}
        yield {"videos": [frames]}

    def _texts(self, modality: Modality) -> Iterator[Mapping[str, Any]]:
        """Yield the argument for a text with the item's placeholder: vLLM's, the chat template's, none."""
        makers: tuple[Callable[[], str], ...] = (
            lambda: self._processor.dummy_inputs.get_dummy_text({modality: 1}),
            lambda: self.own.apply_chat_template([{"role": "user", "content": [{"type": modality}]}]),
        )
        for make in makers:
            text = attempt(make)
            if isinstance(text, str) and text:
                yield {"text": [text]}
        yield {}


def _sampling_rate(processor: Any) -> Mapping[str, int]:
    rate = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
    return {} if rate is None else {"sampling_rate": rate}
