"""requirements/install.py: what pip is configured for holds for uv, and pip follows where uv is not there or fails."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, str(SCRIPT), "-r", "listed.txt"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=20).stdout


def test_uv_installs_from_pips_index(environ):
    assert output(environ) == "uv pip install https://mirror\n"


def test_pip_follows_if_uv_fails(environ):
    lines = output(environ | {"UV_FAILS": "1"}).splitlines()
    assert [lines[0][:2], lines[-1]] == ["uv", "pip install -r listed.txt"]
