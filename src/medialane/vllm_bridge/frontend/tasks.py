"""The tasks of a model, by vLLM's names: they decide which endpoints vLLM's app has."""

from __future__ import annotations

from vllm.config import ModelConfig


def supported_tasks(config: ModelConfig) -> tuple[str, ...]:
    """Return the tasks of a model that generates, as an engine would that had loaded it.

    Transcription in real time is not among them: its WebSocket bypasses intake.
    """
    if not config.registry.is_transcription_model(config.architectures, config):
        return ("generate",)
    if config.registry.is_transcription_only_model(config.architectures, config):
        return ("transcription",)
    return ("generate", "transcription")
