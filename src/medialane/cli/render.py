"""`medialane render`: gateways and a store without workers, for routers and trainers that need a request's tokens."""

from __future__ import annotations

import argparse
from typing import get_args

import msgspec

from medialane.cli import serve
from medialane.cli.settings import Reloading, add_settings, given_settings
from medialane.cluster import local
from medialane.cluster.vllm_flags import has_flag
from medialane.config import Config, SectionName
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.types.errors import StartupFailed

#: The sections of `medialane serve` without the ones that are only for workers.
SECTIONS: tuple[SectionName, ...] = tuple(
    section
    for section in get_args(SectionName)
    if section not in ("simulated", "worker", "routing", "handover", "recording")
)
_COMMON = (
    "gateways", "render-payload", "preparers", "host", "port", "arena-size", "allow-media-network", "log-dir",
    "log-level", "log-format", "access-log",
)  # fmt: skip
#: Settings of workers in the sections above.
_OF_WORKERS = (
    "workers", "encoders", "encoder-gpu-share", "single-gpu", "ray", "address", "gateway-nodes", "join-listen",
)  # fmt: skip
_SCALE_OUT = "--enable-scale-out"

_EPILOG = """\
It needs no GPU and loads no weights. It answers vLLM's render endpoints with the tokens, placeholders and hashes that
plain vLLM has for the same request, most without decoding a pixel:

  POST /v1/chat/completions/render  /v1/completions/render  /v1/responses/render  /v1/messages/render
  POST .../derender  /tokenize  /detokenize    GET /health  /v1/models  /metrics

All others are refused. Tensors are sent to requests that ask for them ("mm_payload": "tensors").

Give it the engines' MODEL, by the same name, and their flags: MODEL and --media-io-kwargs are part of the hashes, and
tokens depend on --mm-processor-kwargs, the chat template and --max-model-len.

examples:
  medialane render Qwen/Qwen2.5-VL-3B-Instruct --gateways 4 --host 0.0.0.0
  medialane render ./model --port 8100 -- --served-model-name vision --max-model-len 8192
  curl localhost:8000/v1/chat/completions/render -H 'Content-Type: application/json' \\
      -d '{"model": "./model", "messages": [{"role": "user", "content": "hello"}]}'

For llm-d's router: docs/guides/llm-d.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="the engines' model: a folder, or a name on a model hub")
    parser.add_argument("--verbose", "-v", action="store_true", help="show the logs of all processes")
    parser.set_defaults(store_socket=None, unannounced=False)
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; 0 after a clean stop. Raises StartupFailed."""
    set_title("render", args.argv)
    given = given_settings(args)
    for name in _OF_WORKERS:
        if name in given:
            raise StartupFailed(f"--{name} is not accepted here: there are no workers (medialane serve)")
    reloading = Reloading.of(args, SECTIONS)
    config = without_workers(reloading.config)
    configure(config.logging, component="serve")
    if not has_flag(args.vllm_args, _SCALE_OUT):
        args.vllm_args = [*args.vllm_args, _SCALE_OUT]
    return serve.run_here(config, reloading, args)


def without_workers(config: Config) -> Config:
    """Return the configuration of a server that renders only."""
    cluster = msgspec.structs.replace(
        config.cluster,
        num_workers=0,
        num_prefill=0,
        num_decode=0,
        num_encoders=0,
        encoder_gpu_share=0.0,
        ray=False,
        gateway_nodes="head",
    )
    gateway = msgspec.structs.replace(config.gateway, render_only=True, join_listen="")
    return local.with_port(msgspec.structs.replace(config, cluster=cluster, gateway=gateway))
