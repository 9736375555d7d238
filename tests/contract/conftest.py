"""vLLM's renderer of the tiny model, without an engine: shared by the contract tests of this session."""

import pytest

VLLM_ARGS = [
    "--max-model-len=8192",
    "--enforce-eager",
    "--skip-mm-profiling",
    '--limit-mm-per-prompt={"image":8,"video":1}',
    "--mm-processor-cache-gb=0",
    "--trust-request-mm-kwargs",
]


@pytest.fixture(scope="session")
def renderer(tiny_model):
    from vllm.renderers import renderer_from_config

    from medialane.vllm_bridge.arguments import create_frontend_config, parse_vllm_args

    renderer = renderer_from_config(create_frontend_config(parse_vllm_args(str(tiny_model), VLLM_ARGS)))
    yield renderer
    renderer.shutdown()
