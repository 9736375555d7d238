"""What a worker does for each stage. No model: the renderer is never called."""

from types import SimpleNamespace

from medialane.core.stage import STAGES
from medialane.vllm_bridge.source_prompt import SourceRenderer


def test_worker_implements_every_stage_left_to_it():
    source = SourceRenderer(None, SimpleNamespace(multimodal_config=None))
    try:
        assert set(source._loads) == {stage.name for stage in STAGES.values() if not stage.is_processed}
    finally:
        source.close()
