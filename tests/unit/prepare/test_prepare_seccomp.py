"""The table of system calls; what the filter does is in `test_prepare_sandbox`."""

import re
from pathlib import Path

import pytest

from medialane.prepare import seccomp

HEADERS = [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")]


@pytest.mark.parametrize(("column", "path"), HEADERS, ids=["x86_64", "aarch64"])
def test_system_call_numbers_match_the_kernel_headers(column, path):
    if not Path(path).exists():
        pytest.skip("the kernel's headers are not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\n", Path(path).read_text()))
    # The generic header has one name for both word sizes.
    found.setdefault("newfstatat", found.get("fstatat", ""))
    for name, numbers in (seccomp._ALLOWED | seccomp._CONDITIONAL).items():
        assert found.get(name, "-1") == str(numbers[column]), name


def test_every_jump_stays_inside_the_program():
    for column, arch in seccomp._COLUMNS.values():
        program = seccomp._program(column, arch, 4711)
        assert program[-1].code == seccomp._RETURN
        for index, insn in enumerate(program):
            assert max(insn.if_true, insn.if_false) < 256
            if insn.code not in (seccomp._LOAD, seccomp._RETURN):
                assert index + 1 + max(insn.if_true, insn.if_false) < len(program)
