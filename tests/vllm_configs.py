"""vLLM's configuration from a model and flags of its command line, as our processes make it."""

from argparse import Namespace

from vllm.config import ModelConfig
from vllm.renderers import BaseRenderer, renderer_from_config

from medialane.vllm_bridge.seams.arguments import create_frontend_config, create_model_config, parse_vllm_args


def vllm_args(model: object, flags: list[str]) -> Namespace:
    return parse_vllm_args(str(model), flags)


def model_config(model: object, *flags: str) -> ModelConfig:
    return create_model_config(vllm_args(model, list(flags)))


def frontend_config(model: object, flags: list[str]):
    return create_frontend_config(vllm_args(model, flags))


def renderer_of(model: object, flags: list[str]) -> BaseRenderer:
    return renderer_from_config(frontend_config(model, flags))
