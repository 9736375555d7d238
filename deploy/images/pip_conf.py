"""Writes pip's configuration of this machine for another root: python pip_conf.py FILE [default|second EXTRA]

FILE is the new pip.conf; the folders and files of this machine that it names are printed, one a line. Extra indexes are
kept, with `default` left out, with `second` behind EXTRA, a folder: uv takes the first index's file of a version.
"""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from urllib.parse import urlsplit

NAMES = {"index-url", "find-links", "cert", "client-cert", "proxy", "trusted-host", "timeout"}


def main(file: Path, which: str = "all", extra: str = "") -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    names = NAMES | ({"extra-index-url"} if which != "default" else set())
    found: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, quoted = line.partition("=")
            prefix, _, setting = name.rpartition(".")
            if prefix == section and setting in names:
                found[setting] = literal_eval(quoted).split()
    if which == "second":
        found["extra-index-url"] = [f"file://{extra}", *found.get("extra-index-url", [])]
    words = [word for each in found.values() for word in each]
    # A folder's index has its files beside it.
    paths = [Path(urlsplit(each).path).parent for each in words if each.startswith("file:")]
    paths += [Path(each) for each in words if each.startswith("/")]
    file.write_text("[global]\n" + "".join(f"{name} = {' '.join(each)}\n" for name, each in found.items()))
    sys.stdout.write("".join(f"{path}\n" for path in dict.fromkeys(paths) if path.exists()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
