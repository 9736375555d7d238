"""Secrets of an operator, planted to see which processes have them: in memory, environment or command line."""

from contextlib import suppress
from pathlib import Path
from secrets import token_hex

#: Of a supervisor's environment, beside its own variables.
VARIABLES = ("MEDIALANE_RPC_SECRET", "VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN")
#: Of each secret.
BEGINNING = b"planted"
#: A mapping is read in pieces of this size, which overlap by the length of a secret.
_PIECE_BYTES = 8 << 20


def planted(*names: str) -> dict[str, str]:
    """Return a new secret for each name."""
    return {name: BEGINNING.decode() + token_hex(16) for name in names}


def secrets_of(pid: int, secrets: dict[str, str]) -> set[str]:
    """Return the names of the secrets that are anywhere in the process's readable memory, environment or command
    line."""
    needles = {name: value.encode() for name, value in secrets.items()}
    found = set()
    for text in texts_of(pid, overlap=max(map(len, needles.values()))):
        if BEGINNING in text:
            found |= {name for name, needle in needles.items() if needle in text}
    return found


def texts_of(pid: int, overlap: int):
    """Yield the process's readable memory, environment and command line in pieces that overlap."""
    for name in ("environ", "cmdline"):
        yield Path(f"/proc/{pid}/{name}").read_bytes()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, _, _, inode, *_ = line.split()
            start, end = (int(edge, 16) for edge in span.split("-"))
            is_own = "w" in rights or inode == "0"  # others are parts of files, such as libraries
            if rights.startswith("r") and is_own and "[v" not in line:  # [vvar], [vsyscall]
                for position in range(start, end, _PIECE_BYTES):
                    with suppress(OSError):  # beyond the end of a mapped file
                        memory.seek(position)
                        yield memory.read(min(_PIECE_BYTES + overlap, end - position))
