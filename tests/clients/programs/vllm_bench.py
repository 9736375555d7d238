"""`vllm bench serve` with random images against each of the servers at these addresses: `vllm_bench.py MODEL URL...`.

Its own command is not in vLLM's distribution for CPUs. One process for all: importing vLLM is most of its time.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

FLAGS = {
    "backend": "openai-chat",
    "endpoint": "/v1/chat/completions",
    "dataset-name": "random-mm",
    "num-prompts": "6",
    "random-input-len": "30",
    "random-output-len": "8",
    "random-mm-base-items-per-request": "2",
    "random-mm-num-mm-items-range-ratio": "0",
    "random-mm-limit-mm-per-prompt": '{"image": 2, "video": 0}',
    "random-mm-bucket-config": "{(224, 308, 1): 0.5, (140, 140, 1): 0.5}",
    "temperature": "0",
    "seed": "7",
}


def bench(model: str, base_url: str) -> dict[str, Any]:
    """The saved result of a run."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        values = {**FLAGS, "model": model, "base-url": base_url, "result-dir": folder}
        flags = [word for name, value in values.items() for word in (f"--{name}", value)]
        main(parser.parse_args([*flags, "--save-result", "--save-detailed", "--disable-tqdm"]))
        (file,) = Path(folder).iterdir()
        return json.loads(file.read_text())


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = [bench(sys.argv[1], url) for url in sys.argv[2:]]
    json.dump(found, sys.stdout)
