"""A family of models in the tests: how its tiny checkpoint is made, and what requests to it look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import tiny_recipe
from small_dummies import with_small_dummies

from medialane.testing import tiny_model

#: What medialane can predict from an image's size alone: least tokens and bytes it takes, the size it is resized to.
ALL_PREDICTED = frozenset(("tokens", "bytes"))

#: Libraries warn of their own code for some families, which in a processor would make an option invalid.
_WARNINGS_IGNORED = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)


@dataclass(frozen=True)
class Family:
    """One kind of model: how it is built, what it supports, and vLLM's flags for serving it.

    `limits` are the most items of each modality in a prompt. `placeholders` is what the chat template writes for one
    item, which a prompt made without the template must contain, too ("{}" is the item's number). `padded` are fields
    that the processor makes as long as the largest item's in the request; the model drops what is added.
    `joint` are those whose last frame depends on whether a longer item is in the request, and whose padding need not be
    zeros. `extra_flags` are vLLM's own.
    `predicted`: those of ALL_PREDICTED that are predicted for it. `has_pixel_limits`: requests may lower those of its
    images and videos. `has_encoder_prompt`: it has an encoder's prompt and a decoder's. `needs` is a package that its
    processor imports; without it, its tests are skipped. `stage` is the one in which it is served.
    `in_make_test`: also in the tests that `make test-all` runs over families; the others are for `make test-families`.
    """

    name: str
    limits: Mapping[str, int]
    placeholders: Mapping[str, str]
    build: Callable[[Path], Path]
    padded: frozenset[str] = frozenset()
    joint: frozenset[str] = frozenset()
    extra_flags: tuple[str, ...] = ()
    predicted: frozenset[str] = frozenset()
    has_pixel_limits: bool = False
    has_encoder_prompt: bool = False
    needs: str = ""
    stage: str = "features"
    in_make_test: bool = False

    @property
    def marks(self) -> tuple[pytest.MarkDecorator, ...]:
        """Marks of its tests."""
        lacks = bool(self.needs) and find_spec(self.needs) is None
        skipped = (pytest.mark.skip(reason=f"its processor needs {self.needs}"),) if lacks else ()
        return skipped if self.in_make_test else (pytest.mark.slow, _WARNINGS_IGNORED, *skipped)

    @property
    def flags(self) -> tuple[str, ...]:
        """vLLM's command line flags on any machine: no compilation, no profiling run with the largest media."""
        return (
            "--enforce-eager",
            "--skip-mm-profiling",
            "--max-model-len=4096",
            with_small_dummies(self.limits),
            *self.extra_flags,
        )

    def prompt(self, *parts: str) -> str:
        """A prompt of these parts, each a modality or text."""
        numbers = {modality: count(1) for modality in self.limits}
        body = "".join(
            self.placeholders.get(part, "").replace("{}", str(next(numbers[part]))) if part in numbers else part
            for part in parts
        )
        return f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n"


def written_by(write: Callable[[Path], None], *own: str) -> Callable[[Path], Path]:
    """Return a `Family.build` that has `write` fill the folder, once per version of the recipe: of `own`, the
    `__file__` of the modules that it is made of, and of what all recipes share."""

    def build(cache: Path) -> Path:
        sources = (tiny_model.__file__, tiny_recipe.__file__, *own)
        digest = tiny_model.recipe_digest(*(Path(path) for path in sources))
        return tiny_model.build_once(cache / f"tiny-{write.__name__.removeprefix('write_')}-{digest}", write)

    return build
