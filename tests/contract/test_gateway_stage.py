"""The stage of a gateway whose model is unfit for features, and what it logs or says."""

import logging
from types import SimpleNamespace

import pytest

from medialane.cli.gateway import fit_stage
from medialane.core.errors import StartupFailed
from medialane.gateway import GatewayConfig

REASON = "a prompt with 2 image item(s) is expanded otherwise if the items are processed separately"


def frontend(unfit):
    profile = SimpleNamespace(
        unfit=unfit,
        unfit_reason="; ".join(unfit.values()),
        is_unfit=len(unfit) == 2,
        fallback_stages={
            modality: "url" if reason == "none accepted" else "decoded" for modality, reason in unfit.items()
        },
    )
    return SimpleNamespace(profile=profile, check_media_options=lambda: None)


def test_fit_model_keeps_the_stage(caplog):
    assert fit_stage(GatewayConfig(stage="auto"), frontend({})).stage == "auto"
    assert not caplog.records


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        ({"image": REASON, "video": "no"}, f"stage decoded, not features: {REASON}; no"),
        ({"video": "no"}, "stage decoded, not features, for prompts with video: no"),
        ({"video": "none accepted"}, "stage url, not features, for prompts with video: none accepted"),
    ],
)
def test_stage_of_an_unfit_model_is_logged_with_the_reason(caplog, unfit, message):
    assert fit_stage(GatewayConfig(stage="auto"), frontend(unfit)).stage == "auto"
    assert caplog.messages == [message]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("stage", ["decoded", "url"])
def test_stage_without_features_is_kept(caplog, stage):
    assert fit_stage(GatewayConfig(stage=stage), frontend({"image": REASON})).stage == stage
    assert not caplog.records


def test_operators_stage_is_not_replaced():
    with pytest.raises(StartupFailed, match=r"expanded otherwise .* use --stage auto, decoded or url"):
        fit_stage(GatewayConfig(stage="features"), frontend({"image": REASON}))
