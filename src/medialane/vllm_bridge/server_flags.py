"""The flags of vLLM's API server that a gateway rejects; it applies all others.

`tests/contract/test_vllm_server_flags.py` lists those, and fails for a flag that a new version of vLLM adds. The
engine's flags (`AsyncEngineArgs`) apply to workers, and are checked by `engine_options`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from medialane.types.errors import StartupFailed

#: Flags that would silently have no effect, and what to do instead.
UNSUPPORTED_FLAGS: Mapping[str, str] = {
    "model_tag": "give the model before `--`, right after the command",
    "host": "give --host before `--`",
    "port": "give --port before `--`",
    "uds": "the gateway listens on --host and --port",
    "headless": "a worker alone is `medialane worker`",
    "api_server_count": "start one `medialane gateway` for each server",
    # vLLM's own fetching is disabled: these restrictions would be lost without a word.
    "allowed_media_domains": "media are fetched by the store: give --allow-media-domain NAME before `--` for each",
    "allowed_local_media_path": "files are read by the store: give --allowed-local-media-path before `--`",
    "grpc": "the gateway serves HTTP",
    "grpc_port": "the gateway serves HTTP",
    "data_parallel_supervisor_port": "medialane monitors its workers itself",
    "dp_supervisor_probe_interval_s": "medialane monitors its workers itself",
    "dp_supervisor_probe_timeout_s": "medialane monitors its workers itself",
    "dp_supervisor_probe_failure_threshold": "medialane monitors its workers itself",
    "enable_per_request_metrics": 'engine timings are not part of responses; send {"medialane": '
    '{"report": true}} in a request, or read Server-Timing',
}


def check_server_flags(args: Namespace, parser: ArgumentParser) -> None:
    """Raise StartupFailed for an unsupported flag, given on the command line or in `--config`, or in vLLM's environment
    variable about redirects."""
    for name, advice in UNSUPPORTED_FLAGS.items():
        if getattr(args, name) != parser.get_default(name):
            flag = "a positional argument" if name == "model_tag" else f"--{name.replace('_', '-')}"
            raise StartupFailed(f"{flag} is not for vLLM here: {advice}")
    from vllm import envs  # imported lazily: processes that only parse settings do not pay for vLLM

    if not envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS:  # as for the restrictions above
        advice = "media are fetched by the store: unset it, and give --media-max-redirects 0"
        raise StartupFailed(f"VLLM_MEDIA_URL_ALLOW_REDIRECTS is not for vLLM here: {advice}")
