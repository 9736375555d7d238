"""Downloads the files that a model's processor is built from, so that the processes which build it, and are exposed to
hostile media, need neither the hub nor a token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from medialane.cluster.model_hub import is_hub_name
from medialane.cluster.vllm_flags import flag_value
from medialane.types.errors import StartupFailed

#: What vLLM leaves out, too (`transformers_utils/repo_utils.py`): weights, and what no processor reads.
_WEIGHTS = [
    f"*.{suffix}"
    for suffix in (
        *("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack", "onnx", "onnx_data"),
        *("png", "jpg", "jpeg", "gif", "webp", "mp3", "mp4", "wav", "flac", "parquet", "arrow", "ipynb", "zip", "tar*"),
    )
]
#: Files that may name code of other repositories (`auto_map`), as `org/name--module.Class`.
_WITH_CODE = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


class Repository(NamedTuple):
    """A repository of the hub; without a revision, its main branch."""

    name: str
    revision: str | None = None


def repositories(model: str, vllm_args: Sequence[str], environ: Mapping[str, str]) -> list[Repository]:
    """Return the repositories of the Hugging Face hub that a processor is built from, but for those of its code. None
    for a model in a folder, on another hub or in an object store: the processor is built from where it is."""
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true") or not _is_on_hub(model):
        return []
    candidates = [
        Repository(model, flag_value(vllm_args, "--revision")),
        Repository(flag_value(vllm_args, "--tokenizer") or "", flag_value(vllm_args, "--tokenizer-revision")),
        Repository(flag_value(vllm_args, "--hf-config-path") or ""),
    ]
    return [repository for repository in candidates if _is_on_hub(repository.name)]


def _is_on_hub(name: str) -> bool:
    return is_hub_name(name) and not Path(name).is_dir() and not name.endswith(".gguf")


async def fetch_files(wanted: Sequence[Repository], *, code_revision: str | None = None) -> None:
    """Bring the files of repositories, but their weights, and the code of others that they name, into this host's
    cache; what is there already is used if the hub cannot be reached. Raises StartupFailed."""
    await _in_thread(lambda: _fetch_all(wanted, code_revision))


async def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that, unlike those of an executor, does not delay the exit of a cancelled process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failure = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=run, name="model files", daemon=True).start()
    await done


def _fetch_all(wanted: Sequence[Repository], code_revision: str | None) -> None:
    folders = [_fetch(repository) for repository in wanted]
    code = {name for folder in folders for name in _code_repositories(folder)}
    for name in code - {repository.name for repository in wanted}:
        _fetch(Repository(name, code_revision))


def _fetch(repository: Repository) -> Path:
    from huggingface_hub import snapshot_download  # comes with vLLM; half a second

    name, revision = repository
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=_WEIGHTS))
    except (OSError, ValueError) as error:
        raise StartupFailed(f"the files of model {name} cannot be downloaded: {error}") from error


def _code_repositories(folder: Path) -> Iterator[str]:
    for name in _WITH_CODE:
        path = folder / name
        for target in _auto_map(path) if path.is_file() else ():
            if "--" in target:
                yield target.partition("--")[0]


def _auto_map(path: Path) -> Iterator[str]:
    """Yield what a file's `auto_map` names; a file that is no JSON object is left to vLLM."""
    with suppress(ValueError):
        document = json.loads(path.read_text())
        for target in (document.get("auto_map") or {}).values() if isinstance(document, dict) else ():
            yield from target if isinstance(target, list) else [target]
