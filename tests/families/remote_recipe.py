"""Models of families for which transformers has neither a configuration nor a model: the hub's checkpoints bring them
as code of their own (`--trust-remote-code`), or only vLLM has them.

The configuration is a class in the model's folder, as in those checkpoints. The weights have the names of vLLM's own
model, whose loaders accept them, too: a process of its own starts vLLM with dummy weights and saves what it finds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path

from medialane.testing.tiny_model import TINY_MODEL_ENVIRON

TRUSTED = "--trust-remote-code"

_WEIGHTS = Path(__file__).with_name("vllm_weights.py")
_CODE = Path(__file__).with_name("remote_code")

#: What checkpoints with code of their own have: a class for the fields, and classes of its parts.
_CONFIGURATION = """\
from transformers import CONFIG_MAPPING, PreTrainedConfig


class TinyConfig(PreTrainedConfig):
    model_type = {model_type!r}

    def __init__(self, **fields):
        for name, found in fields.items():
            if name.endswith("_config") and isinstance(found, dict):
                kind = found.get("model_type", "")
                part = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PreTrainedConfig
                fields[name] = part(**found)
        super().__init__(**fields)
"""


def write_remote_config(folder: Path, architecture: str, fields: Mapping[str, object]) -> None:
    """Write `config.json` and the code of its class."""
    write_config(folder, architecture, {**fields, "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}})
    text = _CONFIGURATION.format(model_type=fields["model_type"])
    (folder / "configuration_tiny.py").write_text(text)


def write_config(folder: Path, architecture: str, fields: Mapping[str, object]) -> None:
    """Write `config.json` for a class that vLLM or transformers has."""
    found = {"architectures": [architecture], "dtype": "bfloat16", **fields}
    (folder / "config.json").write_text(json.dumps(found, indent=2))


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2))


def write_remote_processor(folder: Path, name: str) -> None:
    """Write the module `name` of `remote_code` as the checkpoint's own processor."""
    shutil.copy(_CODE / f"{name}.py", folder / "processing_tiny.py")
    write_json(folder / "processor_config.json", {"auto_map": {"AutoProcessor": "processing_tiny.TinyProcessor"}})


def with_weights(
    write: Callable[[Path], None], *, embeddings: float = 1.0, separate: bool = False
) -> Callable[[Path], None]:
    """Return a `write` that adds random weights to the other files of a model. `embeddings` is the scale of those of
    its tokens: a tied head wants small ones. `separate`: projections that vLLM merges have the names of checkpoints."""

    @wraps(write)
    def write_all(folder: Path) -> None:
        write(folder)
        write_vllm_weights(folder, embeddings, separate=separate)

    write_all.__name__ += "_with_weights"  # of the folder, too
    return write_all


def write_vllm_weights(folder: Path, embeddings: float = 1.0, *, separate: bool = False) -> None:
    environ = {**os.environ, **TINY_MODEL_ENVIRON, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(_WEIGHTS), str(folder), str(embeddings), *(["separate"] if separate else [])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    if not (folder / "model.safetensors").exists():
        raise RuntimeError(f"vLLM does not start with {folder}: {done.stdout[-3000:]} {done.stderr[-3000:]}")
