"""`medialane check` finds no difference from plain vLLM in any family; `-k gemma3` checks one.

Plain vLLM and `medialane serve` run side by side: their starts take most of a family's time.
"""

import os

import pytest
from medialane_process import FORKING_VLLM, ONE_PROCESS_ENGINE, START_S
from rich.console import Console
from tiny_families import CHECKED

from medialane.testing.tiny_model import cache_folder
from medialane.tools.check import CheckProgress, CheckSetup, encode, run_check

pytestmark = pytest.mark.vllm

#: Families that `make nightly` starts, which differ most: video with timestamps, its own `apply`, mixed modalities, an
#: encoder prompt, the tokenizer of Mistral's own format, embeddings instead of tokens.
_ALWAYS = ("qwen3_vl", "paligemma", "qwen2_5_omni", "whisper", "voxtral", "qwen3_vl_embedding")

#: Scores of late interaction are summed in the gateway, by plain vLLM in the engine, in another order.
TOLERANCES = dict.fromkeys(("colqwen3", "colpali", "colmodernvbert"), 1e-5)

#: Cases that plain vLLM refuses and medialane answers: mistral_common wants mono audio, and soxr for other rates;
#: OpenCV reads no frame of a video with one.
ANSWERED = {
    "audio, 44.1 kHz stereo": {"voxtral"},
    "audio, 8 kHz FLAC": {"voxtral"},
    "video, one frame": set(CHECKED),
}

#: Not compared yet: plain vLLM has not loaded their checkpoints; its engine ends with each chat without audio, which
#: the check sends many of, for the realtime model.
_UNTRIED = frozenset(
    ("funasr", "colmodernvbert", "qwen3_asr_aligner", "embedding_gemma2", "voxtral_realtime", "nemotron_embed")
)

OUR_SETTINGS = {"MEDIALANE_PREPARERS": "1", "MEDIALANE_ARENA_SIZE": "256MiB"}


PARAMS = [
    pytest.param(name, marks=() if name in _ALWAYS else (*family.marks, pytest.mark.slow))
    for name, family in CHECKED.items()
    if name not in _UNTRIED
]


@pytest.mark.parametrize("name", PARAMS)
async def test_answers_equal_plain_vllms(name, environ, reports, tmp_path):
    family = CHECKED[name]
    report = await compared(family, environ, tmp_path, whole=reports is not None)
    if reports is not None:
        (reports / f"{name}.json").write_bytes(encode(report))
    differing = {result.case for result in report.results if result.verdict == "differs"}
    assert not differing, report.results
    answered = {result.case for result in report.results if result.verdict == "answered"}
    assert answered <= {case for case, families in ANSWERED.items() if name in families}, report.results
    # Otherwise equal answers would prove little.
    assert not [note for note in report.notes if "as it answers" in note]
    assert family.limits.items() <= report.limits.items() or set(report.kinds) <= {"transcription", "translation"}
    if report.limits:  # uploads have none
        assert set(report.stages) == {f"{family.stage} (shm)"}
        assert "hit" in {result.cache for result in report.results}
    if family.has_encoder_prompt or "pooling" in family.flags:
        assert report.no_embeddings
    elif report.limits and family.stage == "features" and (name in _ALWAYS or not report.no_embeddings):
        # Every item is new once, and comes back: then it is sent as an embedding, without pixels. Some prompts begin
        # with the image; its blocks may be cached then.
        assert "encoded" in report.embeddings, report.no_embeddings
        assert not report.embeddings.keys().isdisjoint(("loaded", "unneeded"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["decoded", "url"])
async def test_encoder_prompts_that_workers_process_give_plain_vllms_answers(stage, environ, tmp_path):
    environ = {**environ, "MEDIALANE_STAGE": stage}
    report = await compared(CHECKED["whisper"], environ, tmp_path, whole=False)
    assert report.passed, report.results
    assert set(report.stages) == {f"{stage} (shm)"}


async def compared(family, environ, logs, *, whole):
    """The report on a family, of the whole matrix or the small one."""
    setup = CheckSetup(
        model=str(family.build(cache_folder(os.environ))),
        vllm_args=family.flags,
        environ=environ,
        own_environ={**environ, **OUR_SETTINGS},
        logs=logs,
        plain_program=FORKING_VLLM,
        plain_flags=(ONE_PROCESS_ENGINE,),
        essential=not whole,
        tolerance=TOLERANCES.get(family.name, 0.0),
        at_once=True,
        start_s=START_S,
    )
    return await run_check(setup, CheckProgress(Console(stderr=True)))
