"""Installs packages into the environment of this Python, with uv: python requirements/install.py -r FILE ..., as `pip
install --no-deps`.

uv needs a tenth of the CPU time of pip, which parses the index page of each package, and downloads in parallel. It does
not read pip's configuration, where a user's index, proxy and certificates are, so they are passed on. If there is no uv
for this machine, or it fails, pip is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from importlib.util import find_spec

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


def main(arguments: list[str]) -> int:
    if find_spec("uv"):
        config = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(config, capture_output=True, text=True, check=True)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--no-deps", *arguments]
        # A user's own variables for uv are stronger.
        if subprocess.run(uv, env=as_variables(listed.stdout) | os.environ, check=False).returncode == 0:
            return 0
        print("uv has failed: now pip, which takes minutes", flush=True)
    # Without --no-compile pip would compile all modules, most of which are never imported.
    pip = ["install", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile", "--no-deps"]
    return subprocess.run([sys.executable, "-m", "pip", *pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
