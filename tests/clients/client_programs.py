"""The programs of clients, what each needs, and how it is run against two servers."""

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from compared_clients import assert_equal

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
NODE = Path(__file__).with_name("node")
#: Clients whose dependencies need not agree with vLLM's have an environment of their own (`make programs`).
OWN_PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"

PROGRAM_S = 240


@dataclass(frozen=True)
class Client:
    """`differing` are the fields of errors that differ from plain vLLM's, by call."""

    command: tuple[str, ...]
    needs: Path | None = None
    differing: Mapping[str, Sequence[str]] = field(default_factory=dict)

    async def asks_the_same(self, ours: Mapping[str, Any], plain: Mapping[str, Any], subtests: Any) -> None:
        """Have the program make its calls to two servers, by their settings; assert that each call gave the same. Skips
        if it cannot run."""
        self._skip_if_it_cannot_run()
        found, right = await asyncio.gather(self._outcomes(ours), self._outcomes(plain))
        assert found.keys() == right.keys() >= self.differing.keys()
        for call in right:
            with subtests.test(call):
                if call == "unknown model":  # ours names the served model, plain vLLM's "<path>" if that is a folder
                    errors = [outcome["error"] for outcome in (found[call], right[call])]
                    if "message" in errors[1]:  # not of LiteLLM: its program leaves it out
                        assert all("does not exist" in str(error.pop("message")) for error in errors)
                assert_equal(found[call], right[call], self.differing.get(call, ()))

    def _skip_if_it_cannot_run(self) -> None:
        if shutil.which(self.command[0]) is None:
            pytest.skip(f"NOT TESTED: a client, since {self.command[0]} is not installed (make programs)")
        if self.needs and not self.needs.exists():
            pytest.skip(f"NOT TESTED: a client, since there is no {self.needs} (make programs)")

    async def _outcomes(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return await printed(*self.command, json.dumps(settings))


async def printed(*command: str) -> Any:
    """Run a program; return the JSON that it prints. Raises AssertionError if it fails, TimeoutError after
    PROGRAM_S."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(PROGRAM_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    return json.loads(output)


def by_python(program: str, python: str | Path = sys.executable, **more: Any) -> Client:
    return Client((str(python), str(PROGRAMS / program)), **more)


def by_node(program: str, **more: Any) -> Client:
    return Client(("node", str(NODE / program)), NODE / "node_modules", **more)
