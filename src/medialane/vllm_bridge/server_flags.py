"""How a gateway treats each flag of vLLM's API server.

The engine's flags (`AsyncEngineArgs`) apply to workers, and are checked by `engine_options`. All server flags are
listed here: `tests/contract/test_vllm_server_flags.py` fails for a flag that a new version of vLLM adds.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from medialane.core.errors import StartupFailed

#: Supported flags: the parser's name, and where it takes effect.
HONOURED: Mapping[str, str] = {
    "config": "vLLM's parser reads the file, and the other flags of this table from it",
    # http_server.uvicorn_config
    **dict.fromkeys(
        (
            "uvicorn_log_level",
            "disable_uvicorn_access_log",
            "disable_access_log_for_endpoints",
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "enable_ssl_refresh",
            "ssl_cert_reqs",
            "ssl_ciphers",
            "h11_max_incomplete_event_size",
            "h11_max_header_count",
        ),
        "http_server",
    ),
    # vLLM's build_app
    **dict.fromkeys(
        (
            "allow_credentials",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "api_key",
            "root_path",
            "middleware",
            "enable_request_id_headers",
            "disable_fastapi_docs",
            "enable_offline_docs",
            "log_error_stack",
            "enable_tokenizer_info_endpoint",
            "enable_scale_out",
        ),
        "build_app",
    ),
    # vLLM's init_app_state
    **dict.fromkeys(
        (
            "lora_modules",
            "chat_template",
            "chat_template_content_format",
            "trust_request_chat_template",
            "trust_request_mm_kwargs",
            "default_chat_template_kwargs",
            "response_role",
            "return_tokens_as_token_ids",
            "enable_auto_tool_choice",
            "exclude_tools_when_tool_choice_none",
            "tool_call_parser",
            "tool_parser_plugin",
            "tool_strict_level",
            "tool_server",
            "max_log_len",
            "enable_prompt_tokens_details",
            "enable_server_load_tracking",
            "enable_force_include_usage",
            "sse_keep_alive_interval",
            "enable_log_outputs",
            "enable_log_deltas",
            "cohere_is_reasoning_model",
            "cohere_format",
            "anthropic_disabled_thinking_effort",
            "fingerprint_mode",
            "fingerprint_value",
        ),
        "init_app_state",
    ),
}

#: Flags without a meaning for a gateway.
IRRELEVANT: Mapping[str, str] = {
    "help": "is the parser's own",
    "enable_flash_late_interaction": "is for scoring by pooling models, which workers do not serve",
}

#: Flags that would silently have no effect, and what to do instead.
REFUSED: Mapping[str, str] = {
    "model_tag": "give the model before `--`, right after the command",
    "host": "give --host before `--`",
    "port": "give --port before `--`",
    "uds": "the gateway listens on --host and --port",
    "headless": "a worker alone is `medialane worker`",
    "api_server_count": "start one `medialane gateway` for each server",
    "grpc": "the gateway serves HTTP",
    "grpc_port": "the gateway serves HTTP",
    **dict.fromkeys(
        (
            "data_parallel_supervisor_port",
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "dp_supervisor_probe_failure_threshold",
        ),
        "medialane monitors its workers itself",
    ),
    "enable_per_request_metrics": 'engine timings are not part of responses; send {"medialane": '
    '{"report": true}} in a request, or read Server-Timing',
}


def check_server_flags(args: Namespace, parser: ArgumentParser) -> None:
    """Raise StartupFailed for an unsupported flag, given on the command line or in `--config`."""
    for name, advice in REFUSED.items():
        if getattr(args, name) != parser.get_default(name):
            flag = "a positional argument" if name == "model_tag" else f"--{name.replace('_', '-')}"
            raise StartupFailed(f"{flag} is not for vLLM here: {advice}")
