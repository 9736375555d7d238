"""All settings: their definitions (`settings`), the sources of their values (`loading`), and the environment of child
processes (`environment`). This is the only package that accesses the process's environment, and only when called."""

from medialane.config.environment import (
    RoleName,
    allowed_environ,
    as_environ,
    changed_imports,
    child_environ,
    enter_environ,
    foreign_environ,
    host_environ,
    process_environ,
    replace_environ,
    set_secrets,
    settings_environ,
    vllm_defaults,
    worker_environ,
)
from medialane.config.loading import ModelTable, TableRules, load_config, load_models, parse_size
from medialane.config.reloading import SettingsChange, SettingsSource
from medialane.config.settings import ClusterConfig, Config, SectionName, ServerConfig, Setting, settings

__all__ = [
    "ClusterConfig",
    "Config",
    "ModelTable",
    "RoleName",
    "SectionName",
    "ServerConfig",
    "Setting",
    "SettingsChange",
    "SettingsSource",
    "TableRules",
    "allowed_environ",
    "as_environ",
    "changed_imports",
    "child_environ",
    "enter_environ",
    "foreign_environ",
    "host_environ",
    "load_config",
    "load_models",
    "parse_size",
    "process_environ",
    "replace_environ",
    "set_secrets",
    "settings",
    "settings_environ",
    "vllm_defaults",
    "worker_environ",
]
