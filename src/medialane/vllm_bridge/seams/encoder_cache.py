"""vLLM's encoder cache connector (`--ec-transfer-config`), and the model's processes through EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.config.multimodal import (
    AudioDummyOptions,
    BaseDummyOptions,
    ImageDummyOptions,
    MultiModalDummyOptions,
    VideoDummyOptions,
)
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from medialane.vllm_bridge.seams.multimodal import embeds_data, new_processor

#: Media with which an encoder is measured: small ones, but their pixels and samples are large fields (`features`).
_SAMPLES: Mapping[str, BaseDummyOptions] = {
    "image": ImageDummyOptions(count=1, width=448, height=448),
    "video": VideoDummyOptions(count=1, width=448, height=448, num_frames=4),
    "audio": AudioDummyOptions(count=1, length=80_000),
}

_SAMPLE_TOKENS = 4096

#: Vocabularies begin with text, or with tokens for padding and unknown text: not with a placeholder of media.
_TEXT_TOKEN = 0

#: Setting of the connector: the engine's own `enable_mm_embeds`.
_EMBEDS = "enable_mm_embeds"


def connect(
    config: VllmConfig, connector: type[ECConnectorBase], extra: Mapping[str, Any], *, only_encodes: bool
) -> None:
    """Make the engine use this connector for loading and saving embeddings; it gets the settings `extra`.

    Set in a configuration that is complete: vLLM would set `enable_mm_embeds` for a connector that is given to it
    before, and change what clients may send (`restore_inputs`). Not as a producer: those measure their encoder with
    the largest possible item at start, and fail if they cannot; saving does not depend on it. Only an engine that
    `only_encodes` must be one: vLLM then allocates no KV cache, and ends a request when its items are encoded.
    """
    extra = {**extra, _EMBEDS: config.model_config.multimodal_config.enable_mm_embeds}
    config.ec_transfer_config = ECTransferConfig(
        ec_connector=connector.__name__,
        ec_role="ec_producer" if only_encodes else "ec_consumer",
        ec_connector_module_path=connector.__module__,
        ec_connector_extra_config=extra,
    )


def restore_inputs(config: VllmConfig) -> None:
    """Accept in this process what is accepted without a connector: EngineCore completes its configuration again."""
    media = config.model_config.multimodal_config
    media.enable_mm_embeds = config.ec_transfer_config.ec_connector_extra_config[_EMBEDS]
    media.allow_missing_mm_embeddings = False


def unfit_reason(config: VllmConfig, *, only_encodes: bool = False) -> str:
    """Return why embeddings of this engine's encoder cannot be kept; empty if they can. An engine that `only_encodes`
    has no language model."""
    model, parallel, lora = config.model_config, config.parallel_config, config.lora_config
    media = model.multimodal_config
    reasons = {
        "--ec-transfer-config is set": config.ec_transfer_config is not None,
        "--language-model-only is set": media is not None and media.language_model_only,
        "the model does not support media": media is None or not model.supports_multimodal_inputs,
        "vLLM passes nothing about embeddings with pooling requests": model.runner_type == "pooling",
        "the model's decoder reads its encoder's output by cross-attention": model.is_encoder_decoder,
        "the model has no separate encoder": model.is_multimodal_raw_input_only_model,
        "--mm-encoder-only is set": media is not None and media.mm_encoder_only and not only_encodes,
        "the tokens of videos are pruned (--video-pruning-rate)": media is not None and bool(media.video_pruning_rate),
        "LoRA adapters may change the encoder (--enable-tower-connector-lora)": lora is not None
        and lora.enable_tower_connector_lora,
        "the model's layers are split over pipeline stages": parallel.pipeline_parallel_size > 1,
        "the model may run on several hosts": may_span_hosts(config),
        "no media are allowed (--limit-mm-per-prompt)": media is not None
        and media.enable_mm_embeds  # otherwise the model does not support media
        and not _allowed(model),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def may_span_hosts(config: VllmConfig) -> bool:
    """Return whether processes of an engine may run on other hosts than its front end."""
    parallel = config.parallel_config
    return bool(
        parallel.nnodes > 1
        or parallel.data_parallel_size_local != parallel.data_parallel_size
        or parallel.distributed_executor_backend in ("ray", "external_launcher")
        or parallel.data_parallel_backend == "ray"
    )


def _allowed(model_config: Any) -> Sequence[str]:
    """Return the modalities that requests may contain."""
    if not model_config.supports_multimodal_inputs:
        return ()
    limits = new_processor(model_config).info.allowed_mm_limits
    return [modality for modality, limit in limits.items() if limit]


def connector_of(engine_core: Any) -> ECConnectorBase | None:
    """Return the scheduler's connector."""
    return engine_core.scheduler.get_ec_connector()


def only_encodes(process: Any) -> bool:
    """Return whether an engine has no language model. `process` is its EngineCore, or the worker of a rank."""
    return bool(process.vllm_config.is_mm_encoder_only)


def on_every_rank(engine_core: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module's function in each process that runs the model, with its worker as the first argument."""
    return list(engine_core.model_executor.collective_rpc(function, args=args))


class WorkerEncoder:
    """The encoder of the model that a process runs, for a few small items at start. `worker` is vLLM's."""

    def __init__(self, worker: Any) -> None:
        self.runner = worker.model_runner
        self.model_config = worker.vllm_config.model_config

    def sample_inputs(self) -> dict[str, Any]:
        """Return a processed prompt with one small item for each modality that requests may contain."""
        processor = new_processor(self.model_config)
        samples = {}
        for modality, limit in processor.info.allowed_mm_limits.items():
            if limit and modality in _SAMPLES:
                samples[modality] = processor.apply(_dummies(processor, modality), TimingContext(enabled=False))
        return samples

    def sample_of_embeds(self, modality: str, embeds: Any) -> Any:
        """Return a processed prompt with one item that is given by its embeddings, in a form of vLLM's chat parser."""
        processor = new_processor(self.model_config)
        prompt = _dummies(processor, modality).prompt
        data = {modality: embeds_data(modality, [embeds], processor)}
        items = processor.info.parse_mm_data(data, validate=False)  # whether clients may send them is asked elsewhere
        return processor.apply(ProcessorInputs(prompt=prompt, mm_data_items=items), TimingContext(enabled=False))

    def embeddings_of(self, modality: str, item: MultiModalKwargsItem) -> torch.Tensor:
        """Run the model's encoder over one item."""
        device = self.runner.device
        ((_, _, batch),) = group_and_batch_mm_kwargs([(modality, item)], device=device, pin_memory=False)
        with torch.inference_mode():
            (output,) = self.runner.get_model().embed_multimodal(**batch)
        return output

    def mrope_positions(
        self, token_ids: list[int], *, modality: str, item: MultiModalKwargsItem, place: PlaceholderRange
    ) -> tuple[list[list[int]], int] | None:
        """Return the rotary positions of a prompt with one item; None if the model has ordinary positions.

        A token of text is added, as in prompts of requests: samples may end with the item, and some models (Qwen3-Omni)
        compute the position of the token after an item with the item's.
        """
        if not self.model_config.uses_mrope:
            return None
        feature = MultiModalFeatureSpec(data=item, modality=modality, identifier="sample", mm_position=place)
        positions, delta = self.runner.get_model().get_mrope_input_positions([*token_ids, _TEXT_TOKEN], [feature])
        return positions.tolist(), int(delta)


def _dummies(processor: Any, modality: str) -> Any:
    """Return the inputs of a prompt with one small item."""
    options = MultiModalDummyOptions({modality: _SAMPLES[modality]})
    return processor.get_dummy_inputs(seq_len=_SAMPLE_TOKENS, mm_counts={modality: 1}, mm_options=options)
