"""requirements/install.py: what pip is configured for holds for uv, and pip follows where uv is not there or fails."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, files, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = Path(__file__).parents[3] / "requirements" / "install.py"


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_indexes_links_and_certificates_of_pip_are_uvs(install):
    listed = """\
:env:.cert='/etc/ssl/own.crt'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://mirror.example/simple'
global.progress-bar='off'
install.find-links='/wheels /more'
"""
    assert install.as_variables(listed) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/ssl/own.crt",
    }


def test_variables_are_stronger_than_files_and_install_than_global(install):
    listed = ":env:.index-url='https://three'\nglobal.index-url='https://one'\ninstall.index-url='https://two'\n"
    assert install.as_variables(listed)["UV_DEFAULT_INDEX"] == "https://three"
    assert install.as_variables(listed.partition("\n")[2])["UV_DEFAULT_INDEX"] == "https://two"


@pytest.fixture
def environ(tmp_path):
    """Of a Python with a `uv` and a `pip` that only say what they are called with; uv fails if UV_FAILS is set."""

    def write(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(f"import os, sys\n{text}")
        (tmp_path / name / "__init__.py").touch()

    write("uv", "print('uv', *sys.argv[1:3], os.environ.get('UV_DEFAULT_INDEX'))\nsys.exit('UV_FAILS' in os.environ)")
    config = "global.index-url='https://mirror'"
    write("pip", f'print("{config}" if sys.argv[1] == "config" else " ".join(["pip", sys.argv[1], *sys.argv[-2:]]))')
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def output(environ):
    command = [sys.executable, str(SCRIPT), "--no-index", "name"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=20).stdout


def test_uv_installs_from_pips_index(environ):
    assert output(environ) == "uv pip install https://mirror\n"


def test_pip_follows_if_uv_fails(environ):
    lines = output(environ | {"UV_FAILS": "1"}).splitlines()
    assert [line.split()[0] for line in lines] == ["uv", "medialane:", "pip"]
    assert lines[-1] == "pip install --no-index name"


def test_wrong_versions_and_missing_distributions_are_found(install):
    entries = {
        "pytest": "pytest==0.1 \\\n    --hash=sha256:00\n",
        "nowhere": "nowhere==1.0\n",
        "elsewhere": "elsewhere==1.0 ; sys_platform == 'win32'\n",
        "pluggy": f"pluggy==0.1 ; sys_platform == 'win32'\npluggy=={version('pluggy')} ; sys_platform != 'win32'\n",
    }
    assert install.wrong(entries) == {
        "pytest": f"{version('pytest')} instead of 0.1",
        "nowhere": "nothing instead of 1.0",
    }


def native(distribution):
    return any(re.search(r"\.so(\.\d+)*$", file.name) for file in files(distribution) or [])


def test_every_dependency_with_native_code_is_imported(install):
    """pyproject.toml's, and vLLM's: a lock's new dependency is checked, too."""
    own = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    vllm = [each for each in packages_distributions()["vllm"] if each.startswith("vllm")]
    wanted = [Requirement(each) for each in own + [line for name in vllm for line in requires(name)]]
    names = {
        canonicalize_name(each.name) for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    # Of use only to torch, which is imported; loaded only where medialane-cpu-torch or a GPU is; programs.
    unchecked = {"intel-openmp", "torchvision", "torchaudio", "torchcodec", "triton", "ninja", "cmake"}
    missing = {name for name in names - unchecked - install.MODULES.keys() if installed(name) and native(name)}
    assert not missing


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
