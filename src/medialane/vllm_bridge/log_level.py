"""The level of vLLM's loggers, whose lines go through our handler (`observability.logging`)."""

from __future__ import annotations

import logging

from vllm import envs


def show_vllm_lines(level: str | None = None) -> None:
    """Have vLLM's lines of at least `level`, by default that of VLLM_LOGGING_LEVEL, written in this process."""
    if not envs.VLLM_CONFIGURE_LOGGING:  # else vLLM has set it
        logging.getLogger("vllm").setLevel(level or envs.VLLM_LOGGING_LEVEL)
