"""Administrative calls, executed by vLLM's AsyncLLM and by what an engine knows of its adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from medialane.types import admin
from medialane.types.admin import AdminCall
from medialane.vllm_bridge.engine.adapters import Adapters
from medialane.vllm_bridge.engine.engine_request import readable
from medialane.vllm_bridge.seams.engine import MsgpackDecoder

_LORA = MsgpackDecoder(LoRARequest)


def _add_lora(adapters: Adapters, call: admin.AddLora) -> Awaitable[str]:
    with readable("LoRA request"):
        lora = _LORA.decode(call.lora)
    return adapters.add(lora)


#: Makes the engine execute a call of each type. Awaiting the result raises what vLLM raises; a LoRA request that cannot
#: be decoded raises PromptRejected.
ACTIONS: dict[type[AdminCall], Callable[[AsyncLLM, Any], Awaitable[bool | None]]] = {
    admin.ResetPrefixCache: lambda llm, call: llm.reset_prefix_cache(call.reset_running_requests, call.reset_connector),
    admin.ResetMmCache: lambda llm, _: llm.reset_mm_cache(),
    admin.ResetEncoderCache: lambda llm, _: llm.reset_encoder_cache(),
    admin.Sleep: lambda llm, call: llm.sleep(call.level, call.mode),
    admin.ReleaseKvCacheMemory: lambda llm, _: llm.release_kv_cache_memory(),
    admin.WakeUp: lambda llm, call: llm.wake_up(None if call.tags is None else list(call.tags)),
    admin.IsSleeping: lambda llm, _: llm.is_sleeping(),
    admin.PauseGeneration: lambda llm, call: llm.pause_generation(mode=call.mode, clear_cache=call.clear_cache),
    admin.ResumeGeneration: lambda llm, _: llm.resume_generation(),
    admin.IsPaused: lambda llm, _: llm.is_paused(),
    admin.StartProfile: lambda llm, call: llm.start_profile(
        call.profile_prefix, delay_iterations=call.delay_iterations, max_iterations=call.max_iterations
    ),
    admin.StopProfile: lambda llm, _: llm.stop_profile(),
}

ADAPTER_ACTIONS: dict[type[AdminCall], Callable[[Adapters, Any], Awaitable[str | None]]] = {
    admin.AddLora: _add_lora,
    admin.UnloadLora: lambda adapters, call: adapters.unload(call.name, keep=call.keep),
}
