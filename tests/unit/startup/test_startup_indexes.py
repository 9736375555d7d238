"""requirements/install.py with real uv and pip, in an environment of its own, from small indexes: what it leaves works,
whichever wheels the indexes have."""

import base64
import hashlib
import http.server
import os
import shutil
import subprocess
import threading
import venv
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZipFile

import pip
import pytest

SCRIPT = Path(__file__).parents[3] / "requirements" / "install.py"
PLATFORM = f"manylinux_2_17_{os.uname().machine}"
BROKEN = "raise OSError(\"cannot load library 'libsndfile.so'\")"
#: Wheels of soundfile, which the installer imports: tag and source.
PURE, NATIVE = ("py3-none-any", BROKEN), (f"py3-none-{PLATFORM}", "__libsndfile_version__ = '1.2.2'")

pytestmark = pytest.mark.timeout(180)


def wheel(folder, tag, source):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"soundfile-0.14.0-{tag}.whl"
    info = "soundfile-0.14.0.dist-info"
    pure = str(tag.endswith("any")).lower()
    files = {
        "soundfile.py": source + "\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: soundfile\nVersion: 0.14.0\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {pure}\nTag: {tag}\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(files[name])}\n" for name in files)
    with ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path):
    """Makes an index of wheels of soundfile, and returns its folder."""

    def make(name, *wheels):
        page = tmp_path / name / "simple" / "soundfile"
        page.mkdir(parents=True)
        paths = [wheel(tmp_path / name / "files", *each) for each in wheels]
        links = [f'<a href="../../files/{path.name}#sha256={digest(path)}">{path.name}</a>' for path in paths]
        (page / "index.html").write_text("\n".join(links))
        return page.parent

    return make


@pytest.fixture
def lock(tmp_path):
    """Writes a lock of soundfile with these wheels."""

    def write(*wheels):
        hashes = [digest(wheel(tmp_path / "locked", *each)) for each in wheels]
        path = tmp_path / "lock.txt"
        path.write_text(" \\\n".join(["soundfile==0.14.0", *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n")
        return path

    return write


@pytest.fixture
def with_uv(tmp_path):
    """Variables that give a Python this environment's uv."""
    uv = pytest.importorskip("uv", reason="there is none for this machine")
    (tmp_path / "with-uv" / "bin").mkdir(parents=True)
    (tmp_path / "with-uv" / "uv").symlink_to(Path(uv.__file__).parent)
    (tmp_path / "with-uv" / "bin" / "uv").symlink_to(uv.find_uv_bin())
    return {"PYTHONPATH": str(tmp_path / "with-uv")}


@pytest.fixture(params=["uv", "pip"])
def installer(request):
    return request.getfixturevalue("with_uv") if request.param == "uv" else {}


@pytest.fixture
def run(tmp_path):
    """Runs the installer in a new environment, which has this one's pip; pip is configured by variables only."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python3.*/site-packages")
    # Not as a link, which pip does not count when it looks for folders that only have files of what it uninstalls.
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")

    def call(lock, variables):
        words = [environment / "bin" / "python", SCRIPT, "--require-hashes", "--only-binary", ":all:", "-r", lock]
        own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
        # With overrides for locking, as this repository's: they are not for installing.
        (tmp_path / "pyproject.toml").write_text("[tool.uv]\noverride-dependencies = ['soundfile==0.13']\n")
        environ = own | variables
        return subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=80)

    return call


def lines(done):
    return [line for line in done.stdout.splitlines() if line.startswith("medialane: ")]


@pytest.fixture
def library(tmp_path):
    """Version of the library that the installed soundfile has loaded."""

    def read():
        python = tmp_path / "environment" / "bin" / "python"
        words = [python, "-c", "import soundfile; print(soundfile.__libsndfile_version__)"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    return read


def configured(*folders):
    first, *more = (folder.as_uri() for folder in folders)
    return {"PIP_INDEX_URL": first, **({"PIP_EXTRA_INDEX_URL": " ".join(more)} if more else {})}


@pytest.mark.parametrize("order", [(PURE, NATIVE), (NATIVE, PURE)], ids=["pure-first", "native-first"])
@pytest.mark.parametrize("locked", [[NATIVE], [PURE, NATIVE]], ids=["native-locked", "both-locked"])
def test_indexes_with_different_wheels_of_a_version(index, lock, run, library, installer, order, locked):
    folders = [index(name, each) for name, each in zip(["one", "two"], order, strict=True)]
    done = run(lock(*locked), installer | configured(*folders))
    assert done.returncode == 0, done.stdout + done.stderr
    assert library() == "1.2.2"
    # Without pip, which needs minutes for the whole lock.
    assert "medialane: uv has failed: now pip, which is slower" not in lines(done)


def test_wrong_wheel_is_replaced_and_named(index, lock, run, library, with_uv):
    """Of an environment that an older lock has filled: uv finds nothing to do."""
    pure = index("one", PURE)
    assert run(lock(PURE), with_uv | configured(pure)).returncode == 1
    done = run(lock(NATIVE), with_uv | configured(pure, index("two", NATIVE)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done) == [
        "medialane: soundfile does not work as installed (cannot load library 'libsndfile.so'): pip installs it again"
    ]
    assert library() == "1.2.2"


def test_what_cannot_be_repaired_is_an_error(index, lock, run, installer):
    done = run(lock(PURE), installer | configured(index("one", PURE)))
    assert done.returncode == 1
    assert lines(done)[-1] == "medialane: soundfile does not work: cannot load library 'libsndfile.so'"


def test_import_that_ends_the_process_is_an_error(index, lock, run, installer):
    crash = (NATIVE[0], "import os, signal; print('importing'); os.kill(os.getpid(), signal.SIGILL)")
    done = run(lock(crash), installer | configured(index("one", crash)))
    assert done.returncode == 1
    assert lines(done)[-1] == "medialane: soundfile does not work: its import ends the process with status -4"


def test_no_index_has_what_is_locked(index, lock, run, installer):
    done = run(lock(NATIVE), installer | configured(index("one", PURE)))
    assert done.returncode != 0
    assert "soundfile" in done.stdout + done.stderr


class Proxy(http.server.SimpleHTTPRequestHandler):
    """Answers for any host, from its folder; knows which it was asked for."""

    def do_GET(self):
        url = urlsplit(self.path)
        self.server.asked.append(url.hostname)
        self.path = url.path
        super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def proxy(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Proxy(*args, directory=tmp_path))
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_index_behind_a_proxy(index, lock, run, library, installer, proxy):
    index("one", NATIVE)
    done = run(
        lock(NATIVE),
        installer
        | {
            "PIP_INDEX_URL": "http://index.invalid/one/simple",
            "PIP_TRUSTED_HOST": "index.invalid",
            "PIP_PROXY": f"http://127.0.0.1:{proxy.server_address[1]}",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert library() == "1.2.2"
    assert set(proxy.asked) == {"index.invalid"}
    assert not lines(done)
