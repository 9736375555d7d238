"""The table of stages: complete, and without a circle."""

from typing import get_args

import pytest

from medialane.types.media import BEST_STAGE, STAGES, StageChoice, StageName, prepared_stage
from medialane.types.request import UnexpandedPrompt


def test_stage_names_and_table_rows_correspond():
    assert list(STAGES) == [stage.name for stage in STAGES.values()] == list(get_args(StageName))
    assert get_args(StageChoice) == ("auto", *get_args(StageName))


@pytest.mark.parametrize("stage", STAGES.values(), ids=str)
def test_fallbacks_of_a_stage_leave_more_to_the_worker(stage):
    """So the fallbacks of `auto` terminate."""
    for name in (stage.if_unsupported, stage.after_failure):
        assert name is None or len(STAGES[name].worker_steps) > len(stage.worker_steps)


def test_auto_ends_with_a_stage_that_every_worker_supports():
    stage = STAGES[BEST_STAGE]
    while stage.if_unsupported is not None:
        stage = STAGES[stage.if_unsupported]
    assert not stage.same_processor


@pytest.mark.parametrize(
    ("choice", "is_processed", "is_decoded"),
    [("auto", True, True), ("features", True, True), ("decoded", False, True), ("url", False, False)],
)
def test_gateway_does_what_the_stage_does_not_leave_to_the_worker(choice, is_processed, is_decoded):
    stage = prepared_stage(choice)
    assert (stage.is_processed, stage.is_decoded) == (is_processed, is_decoded)


def test_prompt_of_a_processed_stage_is_never_expanded_by_the_worker():
    with pytest.raises(ValueError, match="features"):
        UnexpandedPrompt([1], (), stage="features")
