"""Installs packages into the environment of this Python, with uv: python requirements/install.py -r FILE ..., as `pip
install --no-deps`.

uv needs a tenth of the CPU time of pip, which parses the index page of each package, and downloads in parallel. It does
not read pip's configuration, where a user's index, proxy and certificates are, so they are passed on. If there is no uv
for this machine, or it fails, pip is run.

The result is checked: versions are compared with FILE, and what serving needs is imported. What is wrong is installed
again by pip, once. Where indexes have different wheels of one version, uv takes one of the first index and pip the best
of all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ast import literal_eval
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

#: Settings of pip that uv has under another name, as variables; lists are separated by the second word.
_AS_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}
#: Distributions that serving needs and that are native, or load a native library, with a module that does so when it is
#: imported. torchvision and torchaudio are not here: beside a CPU build of torch they need medialane-cpu-torch.
MODULES = {
    "aiohttp": "aiohttp._http_parser",
    "av": "av",
    "blake3": "blake3",
    "cbor2": "cbor2",
    "cryptography": "cryptography.x509",
    "httptools": "httptools",
    "ijson": "ijson.backends.yajl2_c",
    "llguidance": "llguidance",
    "msgspec": "msgspec",
    "numba": "numba",
    "numpy": "numpy",
    "opencv-python-headless": "cv2",
    "oss-harmony": "openai_harmony",
    "outlines-core": "outlines_core",
    "pillow": "PIL._imaging",
    "protobuf": "google.protobuf.message",
    "psutil": "psutil",
    "pybase64": "pybase64",
    "pypdfium2": "pypdfium2_raw",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "regex": "regex",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "setproctitle": "setproctitle",
    "simplejpeg": "simplejpeg",
    "soundfile": "soundfile",
    "tiktoken": "tiktoken",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "uvloop": "uvloop",
    "watchfiles": "watchfiles",
    "xgrammar": "xgrammar",
}
_IMPORTS = """
import importlib, os, sys
report = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what modules print
for name in sys.argv[1:]:
    reason = ""
    print(end=name, file=report, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:  # of a broken library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(f"\\t{reason}", file=report, flush=True)
"""
_IMPORT_TIMEOUT_S = 180
#: Where pip's settings come from, the strongest last: files for all commands, for `pip install`, the environment.
_SECTIONS = ("global", "install", ":env:")


def as_variables(listed: str) -> dict[str, str]:
    """Return uv's variables for the output of `pip config list`."""
    found = {}
    for section in _SECTIONS:
        for line in listed.splitlines():
            name, _, quoted = line.partition("=")
            prefix, _, setting = name.rpartition(".")
            if prefix == section and setting in _AS_VARIABLES:
                variable, separator = _AS_VARIABLES[setting]
                found[variable] = separator.join(literal_eval(quoted).split())
    # As pip does. What is installed is known by its hash.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}


def locked(arguments: list[str]) -> dict[str, str]:
    """Return what the file after -r says of each distribution."""
    found: dict[str, str] = {}
    if "-r" in arguments:
        text = Path(arguments[arguments.index("-r") + 1]).read_text()
        for entry in re.findall(r"^[a-z0-9].*\n(?: .*\n)*", text, re.MULTILINE):
            name = entry.partition("==")[0]
            found[name] = found.get(name, "") + entry
    return found


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def other_version(name: str, entry: str) -> str | None:
    there, listed = installed(name), re.findall(rf"^{name}==(\S+)", entry, re.MULTILINE)
    if there in listed or (there is None and " ; " in entry):  # for other platforms only
        return None
    return f"{there or 'nothing'} instead of {' or '.join(listed)}"


def unusable(names: list[str]) -> dict[str, str]:
    """Return the distributions that cannot be imported, with the reason."""
    modules = {MODULES[name]: name for name in names}
    # -P: nothing is imported from the working directory.
    command = [sys.executable, "-P", "-c", _IMPORTS, *modules]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=_IMPORT_TIMEOUT_S)
    reported = [line.partition("\t") for line in done.stdout.splitlines()]
    if len(reported) < len(modules) and (not reported or reported[-1][1]):  # not ended by one of them
        raise RuntimeError(f"the imports have ended with status {done.returncode} after {reported}")
    crash = f"its import ends the process with status {done.returncode}"
    return {modules[module]: reason or crash for module, ended, reason in reported if reason or not ended}


def wrong(entries: dict[str, str]) -> dict[str, str]:
    """Return the distributions that are not as the file says, or do not work, with the reason."""
    found = {name: reason for name, entry in entries.items() if (reason := other_version(name, entry))}
    if found or not entries.keys() & MODULES.keys():
        return found
    return unusable([name for name in MODULES if installed(name)])


def say(text: str) -> None:
    """In the terminal, too: the Makefile shows such lines."""
    print(f"medialane: {text}", flush=True)


def pip(arguments: list[str]) -> int:
    # Without --no-compile pip would compile all modules, most of which are never imported.
    options = ["--disable-pip-version-check", "--progress-bar", "off", "--no-compile", "--no-deps"]
    return subprocess.run([sys.executable, "-m", "pip", "install", *options, *arguments], check=False).returncode


def uv(arguments: list[str]) -> int:
    config = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(config, stdout=subprocess.PIPE, text=True, check=True)
    # --project: without pyproject.toml's overrides, which are for locking.
    options = ["--project", "/", "--python", sys.executable, "--no-deps"]
    command = [sys.executable, "-m", "uv", "pip", "install", *options, *arguments]
    # A user's own variables for uv are stronger.
    variables = as_variables(listed.stdout) | os.environ
    status = subprocess.run(command, env=variables, check=False).returncode
    # An extra index that has another file of a listed version hides the right one.
    if status and variables.pop("UV_INDEX", None):
        say("uv has failed: again without extra indexes")
        status = subprocess.run(command, env=variables, check=False).returncode
    return status


def install_again(entries: str, arguments: list[str]) -> None:
    """With pip, which compares the wheels of all indexes. Its status does not matter: what it leaves is checked."""
    at = arguments.index("-r")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "wrong.txt"
        file.write_text(entries)
        pip([*arguments[:at], "--force-reinstall", "-r", str(file), *arguments[at + 2 :]])


def main(arguments: list[str]) -> int:
    if find_spec("uv") is None or uv(arguments):
        if find_spec("uv"):
            say("uv has failed: now pip, which is slower")
        if status := pip(arguments):
            return status
    entries = locked(arguments)
    found = wrong(entries)
    if found.keys() & entries.keys():
        for name, reason in found.items():
            say(f"{name} does not work as installed ({reason}): pip installs it again")
        install_again("".join(entry for name, entry in entries.items() if name in found), arguments)
        found = wrong(entries)
    for name, reason in found.items():
        say(f"{name} does not work: {reason}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
