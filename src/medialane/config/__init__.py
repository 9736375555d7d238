"""All settings: their definitions (`settings`), the sources of their values (`loading`), and the environment of child
processes (`environment`). This is the only package that accesses the process's environment, and only when called."""

from medialane.config.environment import (
    as_environ,
    child_environ,
    enter_environ,
    host_environ,
    process_environ,
    settings_environ,
    vllm_defaults,
)
from medialane.config.loading import format_size, load_config, parse_size
from medialane.config.settings import ARENA_DIR, Config, SectionName, ServerConfig, Setting, settings

__all__ = [
    "ARENA_DIR",
    "Config",
    "SectionName",
    "ServerConfig",
    "Setting",
    "as_environ",
    "child_environ",
    "enter_environ",
    "format_size",
    "host_environ",
    "load_config",
    "parse_size",
    "process_environ",
    "settings",
    "settings_environ",
    "vllm_defaults",
]
