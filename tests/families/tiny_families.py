"""Eight families of multimodal models, each as a tiny checkpoint that plain vLLM loads without network or GPU.

Each family is included for a unique behaviour of its processor: `tests/contract/test_family_preparation.py` and
`tests/e2e_families` run over all of them. To add one: a writer in a file of its kind, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import audio_families
import image_families
import qwen_families
import tiny_recipe
from small_dummies import with_small_dummies

from medialane.vllm_bridge import tiny_model


@dataclass(frozen=True)
class Family:
    """One kind of model: how it is built, what it supports, and vLLM's flags for serving it.

    `limits` are the most items of each modality in a prompt. `placeholders` is what the chat template writes for one
    item, which a prompt made without the template must contain, too. `padded` are fields that the processor makes as
    long as those of the largest item in the request; the model drops what is added.
    """

    name: str
    limits: Mapping[str, int]
    placeholders: Mapping[str, str]
    build: Callable[[Path], Path]
    padded: frozenset[str] = frozenset()

    @property
    def flags(self) -> tuple[str, ...]:
        """vLLM's command line flags on any machine: no compilation, no profiling run with the largest media."""
        return (
            "--enforce-eager",
            "--skip-mm-profiling",
            "--max-model-len=4096",
            with_small_dummies(self.limits),
        )

    def prompt(self, *parts: str) -> str:
        """A prompt of these parts, each a modality or text."""
        body = "".join(self.placeholders.get(part, "") if part in self.limits else part for part in parts)
        return f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"


def _written(
    name: str,
    write: Callable[[Path], None],
    limits: Mapping[str, int],
    placeholders: Mapping[str, str],
    padded: frozenset[str] = frozenset(),
) -> Family:
    sources = [Path(module.__file__) for module in (tiny_recipe, audio_families, image_families, qwen_families)]

    def build(cache: Path) -> Path:
        digest = tiny_model.recipe_digest(Path(tiny_model.__file__), *sources)
        return tiny_model.build_once(cache / f"tiny-{name}-{digest}", write)

    return Family(name, limits, placeholders, build, padded)


#: Image before video before audio: the order in which vLLM groups them.
FAMILIES = {
    family.name: family
    for family in (
        # Grids of patches in flat fields; frames sampled by the default sampler.
        Family("qwen2_5_vl", {"image": 2, "video": 2}, qwen_families.VISION, tiny_model.build_tiny_model),
        # Text (timestamps) inside a video's placeholder, an embedding mask, its own frame sampler.
        _written("qwen3_vl", qwen_families.write_qwen3_vl, {"image": 2, "video": 2}, qwen_families.VISION),
        # As many tokens as the image's own size says; as many tiles as the request's largest image has.
        _written(
            "llava_next",
            image_families.write_llava_next,
            {"image": 2},
            image_families.LLAVA,
            frozenset(("pixel_values",)),
        ),
        # Newlines around an image merge with those of the text.
        _written("gemma3", image_families.write_gemma3, {"image": 2}, image_families.GEMMA),
        # Tiles; one text for frames and tiles; a field that is shared by all videos.
        _written("internvl", image_families.write_internvl, {"image": 2, "video": 1}, image_families.INTERNVL),
        # No placeholder in the prompt; its own `apply`.
        _written("paligemma", image_families.write_paligemma, {"image": 1}, {}),
        # Masks that the prompt's expansion reads.
        _written("qwen2_audio", audio_families.write_qwen2_audio, {"audio": 2}, audio_families.AUDIO_PROMPT),
        # Three modalities in one prompt.
        _written(
            "qwen2_5_omni", audio_families.write_qwen2_5_omni, {"image": 2, "video": 1, "audio": 2}, audio_families.OMNI
        ),
    )
}
