"""`vllm bench serve` with random images. Its command itself is not in the distribution for CPUs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from recorded import Calls, settings

server = settings()
calls = Calls(lambda error: {"message": str(error)})

FLAGS = {
    "backend": "openai-chat",
    "endpoint": "/v1/chat/completions",
    "base-url": server.base_url,
    "model": server.model,
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
#: The others are times.
FIELDS = (
    "num_prompts",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "output_lens",
    "generated_texts",
    "errors",
)


@calls
def random_images() -> Any:
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        flags = [word for name, value in FLAGS.items() for word in (f"--{name}", value)]
        saved = ["--save-result", "--save-detailed", "--result-dir", folder, "--disable-tqdm"]
        main(parser.parse_args([*flags, *saved]))
        (file,) = Path(folder).iterdir()
        found = json.loads(file.read_text())
    return {field: found[field] for field in FIELDS}


if __name__ == "__main__":
    calls.print_all()
