"""requirements/platform_wheels.py: a lock has no pure wheel where each supported machine has a platform wheel."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "requirements" / "platform_wheels.py"
BOTH = ("manylinux_2_28_x86_64", "manylinux2014_aarch64.manylinux_2_17_aarch64")


@pytest.fixture(scope="module")
def platform_wheels():
    spec = importlib.util.spec_from_file_location("platform_wheels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheels(tags, platforms=BOTH):
    return [f"name-1.0-{tag}-{platform}.whl" for tag in tags for platform in platforms]


PURE = "name-1.0-py3-none-any.whl"
EACH = [f"cp3{minor}-cp3{minor}" for minor in range(11, 15)]


@pytest.mark.parametrize(
    "others",
    [
        wheels(["py2.py3-none"]),  # soundfile
        wheels(EACH),  # aiohttp
        wheels(["cp310-abi3"]),  # protobuf
        wheels(["cp311-cp311", "cp312-abi3"]),
    ],
)
def test_pure_wheel_that_no_machine_needs(platform_wheels, others):
    assert platform_wheels.needless([PURE, *others]) == [PURE]


@pytest.mark.parametrize(
    "others",
    [
        [],
        wheels(EACH[:-1]),  # Python 3.14 has the pure one only
        wheels(["cp313-abi3"]),
        wheels(EACH, platforms=["manylinux_2_28_x86_64"]),  # ARM
        wheels(EACH, platforms=["musllinux_1_2_x86_64", "musllinux_1_2_aarch64"]),
        wheels(["py3-none"], platforms=["win_amd64", "macosx_11_0_arm64"]),
        wheels(["cp311-cp311t", "cp312-cp312t", "cp313-cp313t", "cp314-cp314t"]),
        wheels(["py2-none"]),
    ],
)
def test_pure_wheel_that_some_machine_needs(platform_wheels, others):
    assert platform_wheels.needless([PURE, *others]) == []


def digest(name):
    return hashlib.sha256(name.encode()).hexdigest()


def hashes(names):
    return "".join(f" \\\n    --hash=sha256:{digest(name)}" for name in names)


@pytest.mark.parametrize("place", [0, 1, -1], ids=["first", "middle", "last"])
def test_only_hashes_of_needless_wheels_are_dropped(tmp_path, place):
    """Wherever they are: a lock is sorted by digest."""
    native, pure_only = wheels(["py3-none"]), ["other-2.0-py3-none-any.whl"]
    mixed = list(native)
    mixed.insert(place % 3, PURE)
    start, rest = "# by make lock\nname==1.0 ; sys_platform == 'linux'", f"\nother==2.0{hashes(pure_only)}\n"
    lock = tmp_path / "lock.txt"
    lock.write_text(start + hashes(mixed) + rest)
    pylock = "\n".join(
        f"[[packages]]\nname = '{name}'\nwheels = ["
        + ", ".join(
            f"{{url = 'https://files.example/{each}', hashes = {{sha256 = '{digest(each)}'}}}}" for each in files
        )
        + "]"
        for name, files in [("name", mixed), ("other", pure_only)]
    )
    subprocess.run([sys.executable, SCRIPT, lock], input=pylock, text=True, check=True, timeout=15)
    assert lock.read_text() == start + hashes(native) + rest


def test_make_lock_drops_them_from_each_lock():
    words = ["make", "--dry-run", "lock"]
    commands = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=15).stdout
    (names,) = (line for line in commands.splitlines() if line.startswith("for name in"))
    locks = {path.stem for path in (ROOT / "requirements").glob("*.txt")} - {"programs"}  # written by hand
    assert set(names.removeprefix("for name in").partition(";")[0].split()) == locks
    assert "requirements/platform_wheels.py requirements/$name.txt" in commands
