"""All settings: what there is (`settings`), where values come from (`loading`), and what processes are given
(`environment`). This is the only room that reads or writes the process's environment, and only when asked."""

from medialane.config.environment import as_environ, child_environ, enter_environ, process_environ, vllm_defaults
from medialane.config.loading import format_size, load_config, parse_size
from medialane.config.names import SectionName
from medialane.config.settings import ARENA_DIR, Config, ServerConfig, Setting, settings

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
    "load_config",
    "parse_size",
    "process_environ",
    "settings",
    "vllm_defaults",
]
