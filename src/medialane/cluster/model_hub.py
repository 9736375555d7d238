"""Models of the Hugging Face hub: whether one is available, and the files that its processor is built from.

vLLM requests one file after another from the hub, each with retries, and its error names neither model nor hub: a
mistyped name without a network is reported here after 3 s, there after two minutes.

Files are downloaded before, so that the processes which build the processor, and are exposed to hostile media, need
neither the hub nor a token.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TypeVar

from medialane.cluster.vllm_flags import flag_value
from medialane.types.errors import StartupFailed

T = TypeVar("T")

#: Covers name resolution, TLS and both requests. Importing vLLM takes longer.
DEADLINE_S = 4.0

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIGS = ("config.json", "params.json")


class ModelHub(NamedTuple):
    """A hub, and the folder of the models that were downloaded from it. It must answer within `deadline_s`."""

    url: str
    cache: str
    is_disabled: bool = False
    deadline_s: float = DEADLINE_S

    @staticmethod
    def of_this_host() -> ModelHub:
        """Return the one that vLLM uses, too: by the variables of Hugging Face (HF_ENDPOINT, HF_HOME, ...)."""
        from huggingface_hub import constants  # comes with vLLM; half a second

        return ModelHub(constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE)


def find_on_hub(
    model: str, revision: str | None = None, *, only_name: bool = False, hub: ModelHub | None = None
) -> None:
    """Raise StartupFailed for an invalid model name and, unless `only_name`, for a model that is not available: by
    default on this host's hub."""
    if not is_hub_name(model):
        raise StartupFailed(f"{model} is neither an existing folder nor a valid model name")
    if only_name:
        return
    from huggingface_hub import get_token, try_to_load_from_cache

    hub = hub or ModelHub.of_this_host()
    if any(isinstance(try_to_load_from_cache(model, name, hub.cache, revision), str) for name in _CONFIGS):
        return
    missing = f"model {model} is neither a folder nor in this machine's cache of models"
    if hub.is_disabled:
        raise StartupFailed(f"{missing}, and HF_HUB_OFFLINE disables access to the hub")
    base, deadline_s = f"{hub.url}/{model}/resolve/{revision or 'main'}", hub.deadline_s
    why = _within(deadline_s, lambda: _query(base, get_token(), deadline_s))
    if why is not None:
        raise StartupFailed(f"{missing}, and the hub {hub.url} {why}")


def is_hub_name(model: str) -> bool:
    """Return whether a string could be the name of a model on the hub."""
    return _HUB_NAME.fullmatch(model) is not None and not model.startswith((".", "-"))


def _query(base: str, token: str | None, timeout_s: float) -> str | None:
    """Return why the hub does not provide the model; None if it does."""
    why = None
    for name in _CONFIGS:
        why = _query_file(f"{base}/{name}", token, timeout_s)
        if why != _UNKNOWN:
            return why
    return why


_UNKNOWN = "does not have it (a private one needs HF_TOKEN)"


def _query_file(url: str, token: str | None, timeout_s: float) -> str | None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method="HEAD")  # noqa: S310 - the operator's own hub
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return _UNKNOWN
            if error.code in (401, 403):
                known = error.headers.get("x-error-code") == "GatedRepo"
                return "requires an HF_TOKEN with access to it" if known else _UNKNOWN
            return None if error.code == 429 else f"returned status {error.code}"
    except (OSError, ValueError, HTTPException) as error:
        return f"cannot be reached: {getattr(error, 'reason', error)}"


def _within(seconds: float, work: Callable[[], str | None]) -> str | None:
    """Return the result of `work`, which is abandoned after the timeout: name resolution has none."""
    try:
        return _in_thread(work).result(seconds)
    except TimeoutError:
        return f"has not responded within {seconds:g} s"


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that, unlike an executor's, does not delay the exit of the process."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # who waits for it may be cancelled, and it goes on

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="model hub", daemon=True).start()
    return done


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
    """Return the repositories of the Hugging Face hub that a processor is built from, without repositories of its code.
    None for a model in a folder, on another hub or in an object store: the processor is built from where it is."""
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


#: Brings a repository's files, but the weights, into this host's cache; returns the folder. Raises OSError, ValueError.
Download = Callable[[Repository], str]


def _download(repository: Repository) -> str:
    from huggingface_hub import snapshot_download  # comes with vLLM; half a second

    return str(snapshot_download(repository.name, revision=repository.revision, ignore_patterns=_WEIGHTS))


async def fetch_files(
    wanted: Sequence[Repository], *, code_revision: str | None = None, download: Download = _download
) -> None:
    """Bring the files of repositories, but their weights, and the code of others that they name, into this host's
    cache; what is there already is used if the hub cannot be reached. Raises StartupFailed."""
    await asyncio.wrap_future(_in_thread(lambda: _fetch_all(wanted, code_revision, download)))


def _fetch_all(wanted: Sequence[Repository], code_revision: str | None, download: Download) -> None:
    folders = [_fetch(repository, download) for repository in wanted]
    code = {name for folder in folders for name in _code_repositories(folder)}
    for name in code - {repository.name for repository in wanted}:
        _fetch(Repository(name, code_revision), download)


def _fetch(repository: Repository, download: Download) -> Path:
    try:
        return Path(download(repository))
    except (OSError, ValueError) as error:
        raise StartupFailed(f"the files of model {repository.name} cannot be downloaded: {error}") from error


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
