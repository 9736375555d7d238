"""Files of ours are private, whatever the umask."""

import ast
import os
import re
from pathlib import Path

import pytest

import medialane
from medialane.runtime.private_files import private, write_private

SRC = Path(medialane.__file__).parent
#: Which files others may read, or that are nowhere: a report where the user wants it, /proc, memory, pipes, a
#: private folder (adapters), and what only tests write.
OPEN = {
    "cli/check_command.py", "prepare/sandbox.py", "runtime/forked_ahead.py",
    "vllm_bridge/engine/adapters.py", "vllm_bridge/items/mistral_chat.py", "wire/certificate_authority.py",
}  # fmt: skip


@pytest.fixture(autouse=True)
def umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("before", [None, 0o644])
def test_private_file_is_readable_by_its_user_alone(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(b"earlier, and longer")
        path.chmod(before)
    write_private(path, b"data")
    assert (path.read_bytes(), mode(path)) == (b"data", 0o600)
    with open(path, "ab", opener=private) as file:
        file.write(b" more")
    assert path.read_bytes() == b"data more"


def writes(call):
    """Whether a call may create a file that others can read."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_bytes", "write_text", "touch"):
        return True
    words = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
    opens = any(re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", word) for word in words if isinstance(word, str))
    return name == "open" and opens and not any(keyword.arg == "opener" for keyword in call.keywords)


def test_every_file_that_is_created_is_private():
    found = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and writes(node) and "testing" not in path.parts
    }
    assert found == OPEN
