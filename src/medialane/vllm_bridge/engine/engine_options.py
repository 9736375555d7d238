"""vLLM's engine arguments for a worker: the user's flags, and the flags that medialane requires.

What can be said about a model before a worker runs it: how its media are handled, if embeddings are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from vllm import envs
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from medialane.types.errors import StartupFailed
from medialane.types.request import ENCODER, WorkerRole
from medialane.vllm_bridge.engine.kv_transfer import transfer_config, transfer_report
from medialane.vllm_bridge.learned.model_profile import ModelProfile, ProfileReport
from medialane.vllm_bridge.seams import cpu, encoder_cache
from medialane.vllm_bridge.seams.arguments import parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import new_processor

#: Independent of Python's version and of the process: gateways compute the same block hashes.
HASH_ALGORITHM = "sha256_cbor"


def engine_args(
    model: str, vllm_args: Sequence[str], *, kv_events: KVEventsConfig | None = None, role: WorkerRole = "worker"
) -> AsyncEngineArgs:
    """Return the engine arguments; an encoder's are for an engine without a language model.

    Raises StartupFailed for flags unknown to vLLM or unsupported in a worker.
    """
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise StartupFailed("VLLM_ALLOW_INSECURE_SERIALIZATION is set: workers do not accept pickles, unset it")
    parsed = parse_vllm_args(model, vllm_args)
    args = AsyncEngineArgs.from_cli_args(parsed)
    if _is_given(vllm_args, "--mm-processor-cache-gb") and parsed.mm_processor_cache_gb:
        raise StartupFailed("--mm-processor-cache-gb must be 0 in a worker: processed media are cached in the arena")
    if _is_given(vllm_args, "--kv-events-config"):
        # vLLM has one publisher per engine, whose events contain every prompt: it is not shared.
        raise StartupFailed("--kv-events-config cannot be set in a worker: it reads its engine's events itself")
    if _is_given(vllm_args, "--prefix-caching-hash-algo") and parsed.prefix_caching_hash_algo != HASH_ALGORITHM:
        raise StartupFailed(f"--prefix-caching-hash-algo must be {HASH_ALGORITHM}: gateways compute the same hashes")
    args.mm_processor_cache_gb = 0
    # `enable_prefix_caching` is left to vLLM: results of some models would change with it, others would not start.
    args.prefix_caching_hash_algo = HASH_ALGORITHM
    args.kv_events_config = kv_events if role != ENCODER else None
    args.mm_encoder_only = args.mm_encoder_only or role == ENCODER
    args.kv_transfer_config = transfer_config(args.kv_transfer_config, role)
    is_single = (args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size) == (1, 1, 1)
    if current_platform.is_cpu() and args.distributed_executor_backend is None and is_single:
        args.distributed_executor_backend = cpu.QUALIFIED_NAME  # a single process runs the model
    return args


def check_prefix_cache(config: VllmConfig) -> None:
    """Raise StartupFailed if the user's flags give a prefix cache to a model whose first request would end the engine
    with it."""
    if config.cache_config.enable_prefix_caching and config.model_config.is_encoder_decoder:
        raise StartupFailed("--enable-prefix-caching is not possible: the model has an encoder and a decoder")


def _is_given(vllm_args: Sequence[str], flag: str) -> bool:
    """Return whether the user gave the flag, in either spelling that vLLM accepts."""
    return any(arg.partition("=")[0].replace("_", "-") == flag for arg in vllm_args)


class ModelReport(msgspec.Struct, frozen=True):
    """`media` is None if the model takes none; `no_embeddings` is why embeddings are not kept, empty if nothing is
    known to prevent it. Of workers with the roles prefill and decode, `connector` is that of their KV blocks, or
    `not_split` why there can be none."""

    architecture: str
    media: ProfileReport | None
    no_embeddings: str
    connector: str = ""
    not_split: str = ""


def model_report(model: str, vllm_args: Sequence[str]) -> ModelReport:
    """Return the report; loads configuration and processor, no weights. Raises what vLLM raises for its flags."""
    config = engine_args(model, vllm_args, kv_events=KVEventsConfig()).create_engine_config(
        UsageContext.UNKNOWN_CONTEXT
    )
    takes_media = config.model_config.supports_multimodal_inputs
    connector, not_split = transfer_report(config)
    return ModelReport(
        architecture=config.model_config.architecture,
        media=ModelProfile(new_processor(config.model_config)).report() if takes_media else None,
        no_embeddings=encoder_cache.unfit_reason(config),
        connector=connector,
        not_split=not_split,
    )
