"""Fill the `predicted` modalities in the rows of docs/models.md without running the whole check of each family.

python tests/families/predicted_modalities.py [FAMILY ...]   # then tests/families/models_page.py

For each family it is tried, as at the start of a server, for which modalities an item's header follows from the size
of the media, and the header of a size that was not among the samples is compared with that of a processed item.
`tests/contract/test_family_headers.py` does that for more sizes.
"""

from __future__ import annotations

import os
import sys

import models_page
import msgspec
from tiny_families import CHECKED
from vllm.renderers import renderer_from_config

from medialane.testing.tiny_model import cache_folder
from medialane.types.media import MediaSize, Modality
from medialane.vllm_bridge.items import NO_OPTIONS, expand_marks
from medialane.vllm_bridge.learned import ModelProfile
from medialane.vllm_bridge.learned.item_shape import trial_audio, trial_video
from medialane.vllm_bridge.learned.processor_factory import RequestProcessor
from medialane.vllm_bridge.learned.sized_headers import noise
from medialane.vllm_bridge.seams.arguments import create_frontend_config, parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import processor_of

_SIZES: dict[Modality, MediaSize] = {
    "image": MediaSize(width=640, height=480),
    "video": trial_video(320, 240, 5).size,
    "audio": trial_audio(3.21).size,
}


def predicted(name: str) -> tuple[str, ...]:
    family = CHECKED[name]
    folder = family.build(cache_folder(os.environ))
    args = parse_vllm_args(str(folder), [*family.flags, "--mm-processor-cache-gb=0"])
    renderer = renderer_from_config(create_frontend_config(args))
    try:
        profile = ModelProfile(processor_of(renderer))
        expand_marks(profile.processor)
        processor = RequestProcessor(profile)
        for modality in profile.content_fields:
            _compare(processor, modality)
        return tuple(sorted(profile.content_fields))
    finally:
        renderer.shutdown()


def _compare(processor: RequestProcessor, modality: Modality) -> None:
    size = _SIZES[modality]
    described = processor.describe(modality, size, NO_OPTIONS)
    item = processor.process(noise(modality, size), NO_OPTIONS)
    if described is None or (described.header, described.size) != (item.header, item.size):
        raise AssertionError(f"the header of {modality} items does not follow from their size")


def main(names: list[str]) -> None:
    rows = models_page.load()
    for name in names or sorted(rows):
        rows[name] = msgspec.structs.replace(rows[name], predicted=predicted(name))
        models_page.ROWS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
        print(name, rows[name].predicted, flush=True)  # noqa: T201 - a script


if __name__ == "__main__":
    main(sys.argv[1:])
