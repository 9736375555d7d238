"""vLLM's flag for the most items of each modality in a prompt, with small media for its warm-up."""

import json
from collections.abc import Mapping

#: Media that vLLM processes once at start: the largest would take seconds in every process.
_SMALL = {"image": {"width": 56, "height": 56}, "video": {"width": 56, "height": 56, "num_frames": 4}, "audio": {}}


def with_small_dummies(limits: Mapping[str, int]) -> str:
    """vLLM's flag for these limits of items in a prompt, small media for its warm-up included."""
    options = {modality: {"count": limit, **_SMALL[modality]} for modality, limit in limits.items()}
    return f"--limit-mm-per-prompt={json.dumps(options)}"
