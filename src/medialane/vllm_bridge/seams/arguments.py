"""vLLM's command line, parsed by vLLM's own parser for gateway, preparers and workers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.server_flags import check_server_flags

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # moved by vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vllm is not typed
    """Raises for an invalid flag, where argparse exits: the caller reports it in one line."""

    def error(self, message: str) -> NoReturn:
        raise StartupFailed(f"vLLM flags after `--`: {message}")


def parse_vllm_args(model: str, vllm_args: Sequence[str]) -> Namespace:
    """Parse the flags after `--`. Raises StartupFailed with vLLM's own message, or for flags of its server that a
    gateway does not support."""
    parser = make_arg_parser(_Parser(prog="medialane serve MODEL -- [vLLM flags]"))
    try:
        args: Namespace = parser.parse_args(["--model", model, *vllm_args])
        validate_parsed_serve_args(args)
    except (OSError, TypeError, ValueError) as error:  # --config names no file, or an invalid one
        raise StartupFailed(f"vLLM flags after `--`: {error}") from error
    if args.model != model:
        raise StartupFailed("--model is not for vLLM here: give the model before `--`, right after the command")
    check_server_flags(args, parser)
    return args


def create_model_config(args: Namespace) -> ModelConfig:
    """Return vLLM's model configuration, without loading weights or using a device."""
    config = AsyncEngineArgs.from_cli_args(args).create_model_config()
    # Like vLLM's own renderer-only server (entrypoints/launchers/render/entry.py:run_launch_fastapi): a process
    # without weights must not query the device for supported quantisation methods.
    config.quantization = None
    return config


def create_frontend_config(args: Namespace) -> VllmConfig:
    """Return a VllmConfig for a process that renders but has no engine. Also sets the reasoning parser in `args`, where
    vLLM's app looks for it, as the creation of an engine's configuration does."""
    outputs = AsyncEngineArgs.from_cli_args(args).create_structured_outputs_config()
    return VllmConfig(model_config=create_model_config(args), structured_outputs_config=outputs)
