"""Writes what an image contains as CycloneDX: python sbom.py LOCK [FOLDER ...] > sbom.cdx.json

Distributions of this Python's environment and of other prefixes, with the lock file's hashes, and Debian's packages.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def of_python(lock: Path, prefixes: list[Path]) -> list[dict[str, Any]]:
    """Each installed distribution; one of another version than the lock file says is an error."""
    entries = dict(re.findall(r"^([a-z0-9-]+)==(\S+.*\n(?: .*\n)*)", lock.read_text(), re.MULTILINE))
    paths = [*sys.path, *(str(path) for prefix in prefixes for path in prefix.glob("lib/python3*/site-packages"))]
    found = []
    for each in distributions(path=paths):
        name, version = re.sub(r"[-_.]+", "-", each.name).lower(), each.version
        entry = entries.get(name, "")
        if entry and entry.split()[0] != version and " ; " not in entry.splitlines()[0]:
            raise SystemExit(f"medialane: {name} {version} is installed, which {lock} has not")
        hashes = [{"alg": "SHA-256", "content": text} for text in re.findall(r"sha256:(\w+)", entry)]
        component = {
            "type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}",
            "licenses": [{"license": {"name": text}}] if (text := each.metadata.get("License-Expression")) else [],
            "properties": [{"name": "medialane:locked-sha256", "value": each["content"]} for each in hashes],
        }  # fmt: skip
        found.append(component)
    return sorted({each["name"]: each for each in found}.values(), key=lambda each: str(each["name"]))


def of_debian() -> list[dict[str, Any]]:
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout  # noqa: S603
    except FileNotFoundError:
        return []
    return [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:deb/debian/{name}@{version}?arch={arch}"}
        for name, version, arch in (line.split() for line in listed.splitlines())
    ]


if __name__ == "__main__":
    components = of_python(Path(sys.argv[1]), [Path(text) for text in sys.argv[2:]]) + of_debian()
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
    json.dump(bom, sys.stdout, indent=1)
