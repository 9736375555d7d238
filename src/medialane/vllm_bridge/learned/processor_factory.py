"""The processor that preparers run, and its factory, which a fork server calls (see `prepare.pool`)."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import msgspec
import numba
import torch
from huggingface_hub import constants

from medialane.prepare.processor import Described, FactoryConfig, NoProcessor, ProcessedItem, Processor
from medialane.runtime.phase import enter_phase
from medialane.types.errors import UnsupportedMediaType
from medialane.types.media import Decoded, FrameBatch, FrameSampler, MediaSize, Modality, Video
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.preparation import VllmFrameSampler, VllmProcessor
from medialane.vllm_bridge.learned.item_shape import check_layout
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.learned.settings import processor_settings
from medialane.vllm_bridge.learned.sized_headers import described
from medialane.vllm_bridge.seams.arguments import create_model_config, parse_vllm_args
from medialane.vllm_bridge.seams.multimodal import new_processor

#: Ends of the names of a model's files besides its weights.
_SMALL_FILES = (".json", ".jinja", ".py", ".model", ".spm", ".bpe", ".tiktoken", "vocab.txt", "merges.txt")


def build_processor(config: bytes) -> Processor:
    """Build and warm up a fork server's processor from a JSON `FactoryConfig`. The process stays single-threaded."""
    enter_phase("loading the model's processor")
    factory_config = msgspec.json.decode(config, type=FactoryConfig)
    with one_thread():
        return _build(factory_config)


def _build(factory_config: FactoryConfig) -> Processor:
    model_config = create_model_config(parse_vllm_args(factory_config.model, factory_config.vllm_args))
    if not model_config.supports_multimodal_inputs:
        return NoProcessor()
    profile = ModelProfile(new_processor(model_config))
    takes_video = "video" in profile.processor.info.supported_mm_limits
    sampler = VllmFrameSampler(model_config, max_sampled_frames=factory_config.max_sampled_frames)
    settings = processor_settings(model_config, profile)
    return RequestProcessor(profile, sampler if takes_video else None, settings)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let libraries start no threads meanwhile, in a process that is forked later, also to become other than a fork
    server. Loops that numba has seen meanwhile remain for one thread."""
    compile_parallel, num_threads = numba.njit, torch.get_num_threads()
    _use_one_thread()
    try:
        yield
    finally:
        numba.njit = compile_parallel
        torch.set_num_threads(num_threads)


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    if (opencv := sys.modules.get("cv2")) is not None:  # otherwise it reads its variable when it is loaded
        opencv.setNumThreads(1)
    _compile_loops_for_one_thread()


def _compile_loops_for_one_thread() -> None:
    """Make numba compile functions that other libraries declare parallel (Kimi-K2.5's image processor) as ordinary ones
    from now on, with equal results: numba's threads do not survive a fork. Such a function is not cached: the parallel
    one has the same name in the cache."""
    compile_parallel = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        alone = {"parallel": False, "cache": False} if options.get("parallel") else {}
        return compile_parallel(*args, **options | alone)

    numba.njit = njit


class RequestProcessor:
    """Makes features for requests (implements `prepare.Processor`). `sampler` chooses the frames of videos; None if the
    model does not support video. What the profile has processed has warmed it up: forked children inherit imported
    modules and caches.

    Theory of operation. In some families the number of embeddings does not follow from an item's tensors
    (`ItemShape.measure`): a prompt is expanded by an image's size, and the model's code expects the tiles that belong
    to that size. A processor option may change the tiles and not the number (LLaVA-OneVision's `crop_size`): the
    encoder then raises inside EngineCore, which ends every request. So an item of such a family is processed with and
    without the options, and must have the same layout. This is done here, not in validation, because it takes a second
    run of the processor: a preparer's memory and time are limited.
    """

    def __init__(
        self,
        profile: ModelProfile,
        sampler: FrameSampler | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self._profile = profile
        self._sampler = sampler
        self._heavy = VllmProcessor(profile.processor)
        self._accepts_tensors = "image" not in profile.unfit and profile.accepts_tensors

    def enter_forkserver(self) -> None:
        """Preparers have no network: huggingface_hub must not check its cache for updates, nor look for a token."""
        _use_one_thread()
        constants.HF_HUB_OFFLINE = True
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True
        constants.HF_TOKEN_PATH = os.devnull

    @property
    def files(self) -> Sequence[str]:
        """What preparers must be able to read: vLLM reloads the processor from it for new options."""
        config = self._profile.processor.info.ctx.model_config
        named = (config.model, config.tokenizer, config.hf_config_path)
        local = {os.path.abspath(path) for path in named if path and os.path.exists(path)}
        files = [file for path in sorted(local) for file in _small_files(path)]
        return [*files, constants.HF_HUB_CACHE]  # the cache does not contain the token

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        if self._sampler is None:
            raise UnsupportedMediaType("this model does not support video")
        return self._sampler.sample(video, io)

    def process(self, media: Decoded, options: bytes) -> ProcessedItem:
        made = self._process(media, options)
        modality = media.modality
        shape = self._profile.shapes.get(modality) if options != NO_OPTIONS else None
        if shape is not None and shape.measure is None:
            default = self._process(media, NO_OPTIONS)
            check_layout(modality, *(decode_item_without_tensors(item.header) for item in (made, default)))
        return made

    def describe(self, modality: Modality, size: MediaSize, options: bytes) -> Described | None:
        content = self._profile.content_fields.get(modality)
        return None if content is None else described(self.process, modality, size, options, content=content)

    def _process(self, media: Decoded, options: bytes) -> ProcessedItem:
        return self._heavy.process(media, options, as_tensor=self._accepts_tensors)


def _small_files(path: str) -> Iterator[str]:
    """Yield the files that processors and tokenizers are made from, in a model's folder and the folders in it: others,
    such as `.env`, may be beside them."""
    if os.path.isfile(path):
        yield path
    for pattern in ("*", "*/*"):
        for file in glob.iglob(pattern, root_dir=path):
            if file.endswith(_SMALL_FILES):
                yield os.path.join(path, file)
