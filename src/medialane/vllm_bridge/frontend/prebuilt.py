"""What a gateway's front end has before it has keys, connections and an event loop; a process that gateways are forked
from builds it for them.

Theory of operation. All of it follows from model and flags: configuration, tokenizer, processor and what is found out
about it, vLLM's routes with their schemas. `build` makes it and `take` hands it over, once, since the app that is made
from it changes renderer and routes. A gateway that is started from scratch calls both. In a fork of a process that has
called `build`, `take` returns what that has built, if it is for the same model and flags.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from vllm.config import ModelConfig, VllmConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.tool_parsers import ToolParserManager

from medialane.observability.logging import unchanged_levels
from medialane.prepare.processor import AssembledPrompt, Assembler, ImageCost
from medialane.types.errors import InvalidFeature, PromptRejected, StartupFailed
from medialane.types.feature import Feature, PlaceholderRange
from medialane.types.media import Modality
from medialane.types.stage import StageName
from medialane.vllm_bridge.engine.plugin import show_vllm_lines
from medialane.vllm_bridge.frontend import pooling_endpoints, render
from medialane.vllm_bridge.frontend.http_server import check_http
from medialane.vllm_bridge.items.mistral_chat import expand_marks
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.processor_factory import one_thread
from medialane.vllm_bridge.learned.settings import processor_settings
from medialane.vllm_bridge.seams.api_server import (
    build_app,
    failing_fast,
    middleware_stack_not_built,
    validate_api_server_args,
)
from medialane.vllm_bridge.seams.arguments import create_frontend_config, parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import processor_of, without_media_warm_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prebuilt:
    """`profile` is None for a text-only model. `tasks` and `routes` (an app without middleware stack and state) are
    None for a model that is served for pooling: its tasks are those that its workers report."""

    args: Namespace
    config: VllmConfig
    renderer: BaseRenderer
    profile: ModelProfile | None
    processor_settings: dict[str, str]
    assembler: Assembler
    tasks: tuple[str, ...] | None
    routes: FastAPI | None


#: By model and flags.
_built: dict[tuple[str, tuple[str, ...]], Prebuilt] = {}


def build(model: str, vllm_args: Sequence[str]) -> None:
    """Load configuration and processors, no weights, and build the app's routes, for the next `take`. Blocks for
    seconds. No key of clients is needed, and no thread remains.

    Raises StartupFailed.
    """
    show_vllm_lines()
    with one_thread():
        _built[model, tuple(vllm_args)] = _build(model, vllm_args)


def take(model: str, vllm_args: Sequence[str]) -> Prebuilt:
    """Return what was built for this model and these flags, or build it. The caller owns it. Raises StartupFailed."""
    key = model, tuple(vllm_args)
    if key not in _built:
        build(model, vllm_args)
    return _built.pop(key)


def routes_of(args: Namespace, config: VllmConfig, tasks: tuple[str, ...]) -> FastAPI:
    """Return vLLM's app for these tasks, without middleware stack and state."""
    render.accept_references()
    with middleware_stack_not_built(), failing_fast(), unchanged_levels():
        return build_app(args, tasks, config.model_config)


def _build(model: str, vllm_args: Sequence[str]) -> Prebuilt:
    args = parse_vllm_args(model, vllm_args)
    check_http(args)
    _import_plugins(args)
    # It logs a line for each reasoning item of a request, on the event loop: 35 ms for 1500 of them.
    logging.getLogger("vllm.entrypoints.openai.responses.utils").setLevel(logging.ERROR)
    try:
        config = create_frontend_config(args)
        renderer = renderer_from_config(config)
    except (OSError, ValueError) as error:
        raise StartupFailed(f"vLLM cannot load the model's configuration or processors: {error}") from error
    without_media_warm_up(renderer)
    profile: ModelProfile | None = None
    if config.model_config.supports_multimodal_inputs:  # not with --language-model-only
        profile = ModelProfile(processor_of(renderer))
        expand_marks(profile.processor)
    tasks: tuple[str, ...] | None = None
    if config.model_config.runner_type == "pooling":
        pooling_endpoints.check_supported(config)
    else:
        tasks = _supported_tasks(config.model_config)
    return Prebuilt(
        args=args,
        config=config,
        renderer=renderer,
        profile=profile,
        processor_settings=processor_settings(config.model_config, profile),
        assembler=_assembler(config, profile),
        tasks=tasks,
        routes=None if tasks is None else routes_of(args, config, tasks),
    )


def _assembler(config: VllmConfig, profile: ModelProfile | None) -> Assembler:
    if profile is None or profile.is_unfit:
        return _NoAssembler({} if profile is None else profile.fallback_stages)
    return profile.assembler(max_tokens=config.model_config.max_model_len)


class _NoAssembler:
    """Used for models of which no items are processed one by one, or without media."""

    accepts_item_options = False
    max_tokens = sys.maxsize
    predicted: frozenset[Modality] = frozenset()

    def __init__(self, fallback_stages: Mapping[Modality, StageName]) -> None:
        self.fallback_stages = fallback_stages

    def assemble(self, token_ids: list[int], features: tuple[Feature, ...], options: bytes) -> AssembledPrompt:
        raise PromptRejected("this model's prompts are not assembled by the gateway")

    def place(
        self, token_ids: list[int], features: tuple[Feature, ...], ranges: Sequence[PlaceholderRange]
    ) -> Sequence[PlaceholderRange | None]:
        raise InvalidFeature("features of this model are not supported: send its media")

    def image_cost(self, size: tuple[int, int], options: bytes) -> ImageCost | None:
        return None


def _supported_tasks(config: ModelConfig) -> tuple[str, ...]:
    """Return the tasks of a model that generates, as an engine would that had loaded it.

    Transcription in real time is not among them: its WebSocket bypasses intake.
    """
    if not config.registry.is_transcription_model(config.architectures, config):
        return ("generate",)
    if config.registry.is_transcription_only_model(config.architectures, config):
        return ("transcription",)
    return ("generate", "transcription")


def _import_plugins(args: Namespace) -> None:
    """Import parser plugins like vLLM's own server start (`launcher.py:setup_server`). Raises StartupFailed for an
    unknown parser."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_api_server_args(args)
    except KeyError as error:
        raise StartupFailed(f"vLLM flags after `--`: {error.args[0]}") from error
