"""Two seams of vLLM's renderer that route media through the gateway.

vLLM's renderer calls a *media connector* for every media URL, then `_process_multimodal_async` with the results. Our
connector returns the `MediaRef` that intake left in the body; our replacement for the second call makes the gateway
prepare all of them at once. Items for which vLLM fetches nothing (embeddings, media given by uuid only) reach the
second call as None with a uuid, which intake has replaced by the reference. The first seam is public (a registry), the
second is an attribute of the renderer instance; `tests/contract/test_renderer_hook.py` pins both.

*Speech.* vLLM's handlers of transcriptions decode an upload in the server's process, and cut long audio into clips at
quiet places. Intake has replaced the upload by a reference. The store decodes it, in a sandboxed process, at the
model's sample rate, and vLLM's own code gets the result as a file of the exact samples, written by us: it cuts it
into clips: each becomes a media item of the model's prompt.

Short prompts are rendered on the event loop instead of the renderer's thread (`install_inline_rendering`).

vLLM applies the chat template and tokenizes in a thread. For a short prompt each takes about 0.1 ms, less than the
hand-over to the thread and back; and while the event loop is busy with other requests, the thread waits for the
interpreter's lock, up to `sys.getswitchinterval()` (5 ms) each time.

The event loop does this work only for bodies of at most `MAX_TEXT_BYTES`, and for at most about `MAX_LOOP_S` per
iteration: a small body may contain a thousand prompts. Tokenizers are not thread-safe in general, so it does none
while the thread is working. Chats whose tokenizer also processes blanks for media (`mistral_chat.py`) stay in the
thread: 65 images in 4 KiB take 30 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer

from medialane.types.errors import (
    EmptyMedia,
    InvalidMediaUrl,
    InvalidRequest,
    InvalidUpload,
    MedialaneError,
    PromptTooLong,
    TooLarge,
    TooManyMediaItems,
    UnknownMediaUuid,
    UnsupportedMediaType,
)
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import canonical_options
from medialane.types.media import MediaRef, Modality
from medialane.vllm_bridge.frontend.render import HashFactors, current_answer
from medialane.vllm_bridge.frontend.request_backend import Generation, MediaReferences, Rendering, RequestBackend
from medialane.vllm_bridge.items.mistral_chat import tokenizes_blanks
from medialane.vllm_bridge.items.options import check_options, check_processor_options, final_io, item_options, model_io
from medialane.vllm_bridge.items.prepared_input import engine_input
from medialane.vllm_bridge.learned.model_profile import ModelProfile
from medialane.vllm_bridge.seams.api_server import ToClips, decode_speech_by
from medialane.vllm_bridge.seams.multimodal import (
    accepted_modalities,
    prepare_media_by,
    submit_rendering_by,
    unknown_modalities,
)
from medialane.vllm_bridge.seams.vision_chunk import ChunkSource, chunk_sources, takes_chunks

#: The name under which the connector is registered; VLLM_MEDIA_CONNECTOR selects it.
CONNECTOR = "medialane"


class ReferenceConnector(MediaConnector):  # type: ignore[misc]  # vllm is not typed
    """Leaves fetching to the gateway: a URL in the body is already a reference. vLLM creates a connector per request,
    of the subclass that `install` registers.

    vLLM's own fetching, used by all other methods of its connector, is disabled: it would bypass our URL guard.
    """

    hook: ClassVar[RendererHook]

    # The parameters have vLLM's names, by which it passes some. Options do not matter: nothing is fetched.

    def fetch_image(self, image_url: str, **_options: Any) -> Any:
        return self.ref("image", image_url)

    async def fetch_image_async(self, image_url: str, **_options: Any) -> Any:
        return self.ref("image", image_url)

    def fetch_video(self, video_url: str, **_options: Any) -> Any:
        return self.ref("video", video_url)

    async def fetch_video_async(self, video_url: str, **_options: Any) -> Any:
        return self.ref("video", video_url)

    def fetch_audio(self, audio_url: str, **_options: Any) -> Any:
        return self.ref("audio", audio_url)

    async def fetch_audio_async(self, audio_url: str, **_options: Any) -> Any:
        return self.ref("audio", audio_url)

    def _refuse_embeddings(self, data: str) -> None:
        """Reject embeddings that intake has not extracted: vLLM's connector would unpickle them in this process."""
        self._refuse("this form of embeddings is not supported by this gateway")

    async def _refuse_embeddings_async(self, data: str) -> None:
        self._refuse_embeddings(data)

    fetch_image_embedding = fetch_audio_embedding = fetch_video_embedding = _refuse_embeddings
    fetch_image_embedding_async = fetch_audio_embedding_async = _refuse_embeddings_async
    fetch_video_embedding_async = _refuse_embeddings_async

    def load_from_url(self, url: str, *_args: Any, **_kwargs: Any) -> None:
        self._refuse("this form of media is not supported by this gateway")

    async def load_from_url_async(self, url: str, *_args: Any, **_kwargs: Any) -> None:
        self.load_from_url(url)

    def ref(self, modality: Modality, url: str) -> MediaRef | ChunkSource:
        ref = self.hook.reference(modality, url, self.media_io_kwargs)
        return ChunkSource(ref) if self.hook.takes_chunks else ref

    def _refuse(self, message: str) -> NoReturn:
        with remembered_errors(self.hook.backend):
            raise InvalidRequest(message)


def install(renderer: BaseRenderer, backend: RequestBackend, profile: ModelProfile) -> None:
    """Route this renderer's media through `backend`."""
    hook = RendererHook(renderer, backend, profile)
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)(type("Connector", (ReferenceConnector,), {"hook": hook}))
    prepare_media_by(renderer, hook.process)


@contextmanager
def remembered_errors(backend: Generation) -> Iterator[None]:
    """Record our errors before they reach vLLM's app: the response is built from them."""
    try:
        yield
    except MedialaneError as error:
        backend.fail(error)
        raise


class RendererHook:
    """Implements both seams: completes the references from intake with options of model and request, and has the
    gateway prepare the prompt."""

    def __init__(self, renderer: BaseRenderer, backend: RequestBackend, profile: ModelProfile) -> None:
        self.backend = backend
        self._io = model_io(renderer.model_config)
        processor = profile.processor
        self._max_pixels = profile.max_pixels
        self._has_encoder_prompt = bool(renderer.model_config.is_encoder_decoder)
        self._sample_rate = expected_sample_rate(processor)
        #: Whether vLLM's chat parser makes chunks of this model's images.
        self.takes_chunks: bool = takes_chunks(processor)
        is_checked = not (self.takes_chunks or unknown_modalities(processor))  # by vLLM's chat parser
        self._accepted = None if is_checked else accepted_modalities(processor)

    def reference(self, modality: Modality, url: str, request_io: Mapping[str, Any] | None) -> MediaRef:
        """Return the reference for a media URL of the body. Raises what `MediaReferences.resolve` raises, and
        InvalidRequest for its options, or if this model takes media as something that we do not have."""
        with remembered_errors(self.backend):
            if self._accepted is not None and modality not in self._accepted:
                raise InvalidRequest(f"{modality}s are not supported by this gateway for this model")
            return self._completed(self.backend.resolve(url), modality, request_io)

    async def process(  # noqa: PLR0917 - vLLM's signature
        self,
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        """Replaces `BaseRenderer._process_multimodal_async`."""
        with remembered_errors(self.backend):
            check_options(mm_processor_kwargs or {}, "mm_processor_kwargs")
            check_processor_options(mm_processor_kwargs)
            options = canonical_options(mm_processor_kwargs or {})
            items = await self._references(mm_data, mm_uuids or {}, media_io_kwargs)
            try:
                factors = msgspec.json.encode(HashFactors(mm_processor_kwargs or {}, media_io_kwargs or {}))
                media_prompt = MediaPrompt(list(prompt), items, options, self._has_encoder_prompt, factors)
                answer = current_answer()
                prepare = self.backend.prepare if answer is None else answer.prepare
                return engine_input(await prepare(media_prompt))
            except PromptTooLong as error:  # the response is vLLM's for a complete prompt
                raise VLLMValidationError(error.message) from error

    def _completed(self, ref: MediaRef, modality: Modality, request_io: Mapping[str, Any] | None) -> MediaRef:
        """Return the reference with the merged decode options of model, request and item, and those processor options
        of the item that the model supports.

        The modality may differ: vLLM loads the audio of a video (`use_audio_in_video`) from the video's own URL.
        """
        item = ref.io if ref.modality == modality else b"{}"
        io = final_io(modality, self._io, request_io, item)
        options = item_options(ref.options, self._max_pixels.get(modality), ref.param)
        return msgspec.structs.replace(ref, modality=modality, io=io, options=options)

    async def _references(
        self, mm_data: Mapping[str, Any], mm_uuids: Mapping[str, Any], request_io: Mapping[str, Any] | None
    ) -> tuple[MediaRef, ...]:
        """Return the references that vLLM's renderer has collected. Raises InvalidRequest, UnknownMediaUuid, and
        TooManyMediaItems for one that is repeated: intake has counted it once."""
        refs = []
        for name, value in mm_data.items():
            given = [value] if is_audio(value) or not isinstance(value, list | tuple) else value
            modality, items = chunk_sources(name, given)
            uuids = mm_uuids.get(modality) or [None] * len(items)
            refs += [await self._one(modality, item, uuid, request_io) for item, uuid in zip(items, uuids, strict=True)]
        _check_not_repeated(refs)
        return tuple(refs)

    async def _one(self, modality: str, item: Any, uuid: str | None, request_io: Mapping[str, Any] | None) -> MediaRef:
        if isinstance(item, MediaRef):
            return item
        if is_audio(item):  # a transcription's, decoded by the store
            return await self.backend.audio(*sampled(item, self._sample_rate))
        if item is not None:
            raise InvalidRequest(f"{modality} given as a raw object is not supported by this gateway")
        if not uuid:
            raise EmptyMedia(f"{modality} given without URL, data or uuid")
        ref = await self._by_uuid(modality, uuid)
        return ref if ref.is_embeds else self._completed(ref, ref.modality, request_io)

    async def _by_uuid(self, modality: str, uuid: str) -> MediaRef:
        """Return the reference by which intake replaced the uuid, with its content."""
        unknown = UnknownMediaUuid(f"{modality} given by an unknown uuid: send its URL or data")
        try:
            ref = await self.backend.by_uuid(uuid)
        except InvalidMediaUrl as error:
            raise unknown from error
        if ref.modality != modality or not (ref.is_embeds or ref.content):
            raise unknown
        return ref


def _check_not_repeated(refs: list[MediaRef]) -> None:
    """The audio of a video (`use_audio_in_video`) has the same place, and counts as its own item."""
    places: set[tuple[str, Modality]] = set()
    for ref in refs:
        if (place := (ref.param, ref.modality)) in places:
            raise TooManyMediaItems("the request's media item is used more than once", param=ref.param)
        places.add(place)


def measure_rendering(renderer: BaseRenderer, backend: Rendering) -> None:
    """Have `backend` measure how long chats and prompts are rendered, with their media."""

    def measured(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def rendered(*args: Any, **kwargs: Any) -> Any:
            with backend.rendering():
                return await render(*args, **kwargs)

        return rendered

    renderer.render_chat_async = measured(renderer.render_chat_async)
    renderer.render_cmpl_async = measured(renderer.render_cmpl_async)


#: Bounds a single call: tokenizing this much takes about 1 ms.
MAX_TEXT_BYTES = 4096

#: No further call is made in the same iteration of the event loop.
MAX_LOOP_S = 0.004

Submit = Callable[..., Any]


def install_inline_rendering(renderer: BaseRenderer, backend: Rendering) -> None:
    """Render the short prompts of `backend`'s requests on the event loop, if that takes no longer with media."""
    if tokenizes_blanks(renderer):
        return
    submit_rendering_by(renderer, lambda submit: InlineRendering(submit, backend).submit)


class InlineRendering:
    """Replaces `submit` of the renderer's executor, which is called on the event loop only."""

    def __init__(self, submit: Submit, backend: Rendering) -> None:
        self._submit = submit
        self._backend = backend
        self._in_thread: list[Future[Any]] = []
        self._used_s = 0.0

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the future of the call. A completed one belongs to the loop, which `run_in_executor` returns as it
        is: the caller continues without waiting for an iteration."""
        if not self._is_inline():
            future: Future[Any] = self._submit(work, *args, **kwargs)
            self._in_thread.append(future)
            return future
        loop = asyncio.get_running_loop()
        if not self._used_s:
            loop.call_soon(self._start_iteration)
        started = time.perf_counter()
        done: asyncio.Future[Any] = loop.create_future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by the caller's await
            done.set_exception(error)
        self._used_s += time.perf_counter() - started
        return done

    def _is_inline(self) -> bool:
        size = self._backend.text_bytes
        if size is None or size > MAX_TEXT_BYTES or self._used_s > MAX_LOOP_S:
            return False
        self._in_thread = [future for future in self._in_thread if not future.done()]
        return not self._in_thread

    def _start_iteration(self) -> None:
        self._used_s = 0.0


def is_audio(item: object) -> bool:
    """Return whether this is one clip: an array, or an array and its sample rate."""
    return isinstance(item, np.ndarray) or (
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], np.ndarray) and np.isscalar(item[1])
    )


def sampled(item: Any, default_rate: int) -> tuple[NDArray[np.float32], int]:
    """Return the samples of a clip and their rate. Raises InvalidRequest unless it is mono."""
    samples, rate = item if isinstance(item, tuple) else (item, default_rate)
    if samples.ndim != 1:
        raise InvalidRequest("only mono audio is supported")
    return samples.astype(np.float32, copy=False), round(rate)


def expected_sample_rate(processor: BaseMultiModalProcessor) -> int:
    """Return the rate that the model expects, to which vLLM does not resample an array without a rate; 16 kHz if it
    takes no audio, or any rate."""
    resampler = processor.info.get_data_parser().audio_resampler
    return round(resampler.target_sr or 16_000)


def install_speech(app_state: Any, backend: RequestBackend) -> None:
    """Have `backend` decode the uploads of the app's speech endpoints: transcription and translation."""

    def wrap(to_clips: ToClips, sample_rate: float) -> ToClips:
        async def decoded_by_store(upload: bytes) -> Any:
            url = upload.decode("ascii", "replace")  # not a reference if intake could not parse the form
            with remembered_errors(backend):
                _check_size(backend.resolve(url))
                wave = await _decoded(backend, url, round(sample_rate))
            return await to_clips(wave)

        return decoded_by_store

    decode_speech_by(app_state, wrap)


async def _decoded(backend: MediaReferences, url: str, sample_rate: int) -> bytes:
    """Raises InvalidUpload where the media of a chat get another status."""
    try:
        return await backend.decode_audio(url, sample_rate)
    except (TooLarge, UnsupportedMediaType) as error:
        raise InvalidUpload(error.message, param=error.param) from error


def _check_size(ref: MediaRef) -> None:
    """Apply vLLM's limit, which its own check has compared with the size of the reference."""
    limit = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB << 20
    if len(ref.data or b"") > limit:
        raise InvalidUpload(f"the file has {len(ref.data or b'')} bytes, more than {limit}", param=ref.param)
