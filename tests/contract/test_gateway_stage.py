"""The stage of a gateway whose model is unfit for features, and what it logs or says."""

import logging
from types import SimpleNamespace

import pytest

from medialane.cli.gateway import fit_stage
from medialane.gateway import GatewayConfig
from medialane.types.errors import StartupFailed

REASON = "a prompt with 2 image item(s) is expanded otherwise if the items are processed separately"


def frontend(unfit):
    profile = SimpleNamespace(
        unfit=unfit,
        unfit_reason="; ".join(unfit.values()),
        is_unfit=len(unfit) == 2,
        unfit_stages={
            modality: "url" if reason == "none accepted" else "decoded" for modality, reason in unfit.items()
        },
    )
    model_config = SimpleNamespace(multimodal_config=SimpleNamespace(media_io_kwargs={}))
    return SimpleNamespace(profile=profile, config=SimpleNamespace(model_config=model_config))


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def logged():
    """What the gateway logs, whatever has configured this process's logging before (vLLM does, and so do commands)."""
    logger, handler = logging.getLogger("medialane.cli.gateway"), Records()
    level, disabled = logger.level, logger.disabled
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.disabled = False
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.disabled = disabled


def test_fit_model_keeps_the_stage(logged):
    assert fit_stage(GatewayConfig(stage="auto"), frontend({})).stage == "auto"
    assert not logged


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        ({"image": REASON, "video": "no"}, f"stage decoded, not features: {REASON}; no"),
        ({"video": "no"}, "stage decoded, not features, for prompts with video: no"),
        ({"video": "none accepted"}, "stage url, not features, for prompts with video: none accepted"),
    ],
)
def test_stage_of_an_unfit_model_is_logged_with_the_reason(logged, unfit, message):
    assert fit_stage(GatewayConfig(stage="auto"), frontend(unfit)).stage == "auto"
    assert [(record.getMessage(), record.levelno) for record in logged] == [(message, logging.WARNING)]


@pytest.mark.parametrize("stage", ["decoded", "url"])
def test_stage_without_features_is_kept(logged, stage):
    assert fit_stage(GatewayConfig(stage=stage), frontend({"image": REASON})).stage == stage
    assert not logged


def test_operators_stage_is_not_replaced():
    with pytest.raises(StartupFailed, match=r"expanded otherwise .* use --stage auto, decoded or url"):
        fit_stage(GatewayConfig(stage="features"), frontend({"image": REASON}))
