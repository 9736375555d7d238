"""Families of multimodal models, each as a tiny checkpoint that plain vLLM loads without network or GPU.

To add one: a function that writes it, and a `Family` in the FAMILIES of a file of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import audio_families
import audio_more_families
import embedding_families
import hearing_families
import image_families
import internvl_like_families
import kimi_families
import llava_families
import long_audio_families
import mistral_families
import pooling_families
import processor_families
import pytest
import query_families
import qwen_families
import qwen_like_families
import remote_families
import remote_processor_families
import speech_families
import tile_families
import vllm_processor_families
import vllm_speech_families
import weightless_families
import whisper_family
from family import Family

_MODULES = (
    qwen_families,
    image_families,
    audio_families,
    llava_families,
    tile_families,
    qwen_like_families,
    query_families,
    audio_more_families,
    long_audio_families,
    mistral_families,
    whisper_family,
    speech_families,
    internvl_like_families,
    vllm_processor_families,
    kimi_families,
    remote_families,
    vllm_speech_families,
    processor_families,
)

#: Modules with families whose processors alone are tried.
_PROCESSORS = (
    processor_families,
    weightless_families,
    vllm_processor_families,
    remote_families,
    remote_processor_families,
    vllm_speech_families,
)


def _by_name(families: Iterable[Family]) -> dict[str, Family]:
    return {family.name: family for family in families}


_RUN = _by_name(family for module in _MODULES for family in module.FAMILIES)

#: All families that generate and whose items are processed one by one, by name.
FAMILIES = _by_name(family for family in _RUN.values() if family.stage == "features")

#: These, and the ones whose processors alone can be tried.
PREPARED = FAMILIES | _by_name(family for module in _PROCESSORS for family in module.PROCESSORS)

#: Those whose items depend on the others of a request: they are served in stage `decoded`.
DEPENDENT = _by_name((*internvl_like_families.DEPENDENT, *weightless_families.DEPENDENT))

#: All that `medialane check` compares whole: pooling models, too, which tests of prompts and answers do not fit.
_POOLING = (pooling_families, embedding_families, hearing_families)
CHECKED = (
    _RUN
    | _by_name((*internvl_like_families.DEPENDENT, *weightless_families.DEPENDENT_WHOLE))
    | _by_name(family for module in _POOLING for family in module.FAMILIES)
)


def family_params(*, modality: str | None = None, predicted: str | None = None, pixel_limits: bool = False) -> list:
    """Return the names of all families as parameters of a test, or of those that take `modality`, of which `predicted`
    is predicted, and that have `pixel_limits`. Those outside `make test-all` are marked slow."""
    return [
        pytest.param(name, marks=family.marks)
        for name, family in FAMILIES.items()
        if (modality is None or modality in family.limits)
        and (predicted is None or predicted in family.predicted)
        and (family.has_pixel_limits or not pixel_limits)
    ]
