"""A request backend without a gateway: it records the calls of vLLM's app and outputs fixed tokens."""

import asyncio
from contextlib import nullcontext
from itertools import repeat

import msgspec
import numpy as np

from medialane.gateway import current_scope, wave_bytes
from medialane.types.errors import InvalidRequest, NoWorkerReady, PromptRejected, UnknownMediaUuid
from medialane.types.feature import Feature, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.media import MediaRef, MediaSize
from medialane.types.request import CompletionDelta, OutputDelta, PooledPart
from medialane.types.tensor import TensorSpec

#: Tokens that one image takes in a prompt that the fake expanded.
NUM_EMBEDS = 5


class FakePromptMedia:
    """Media in which each placeholder takes NUM_EMBEDS tokens."""

    async def prepare(self, prompt, *, with_tensors=False):
        self.scopes.append(current_scope())
        self.prompts.append(prompt)
        self._fail_at("prepare")
        if self.placed:
            return PreparedPrompt(prompt.token_ids, (), ("0" * 64,) * len(prompt.items), prompt, None)
        return self._expand(prompt)

    async def describe(self, prompt):
        return await self.prepare(prompt)

    def tensors(self, feature):
        return []

    async def refer(self, prepared):
        return [f"medialane:feature/{placed.feature.mm_hash}" for placed in prepared.features]

    async def audio(self, samples, sample_rate):
        return MediaRef("audio", "file", data=wave_bytes(samples, sample_rate))

    def _expand(self, prompt):
        if prompt.is_encoder_prompt:
            feature = Feature("audio", "0" * 64, b"", (), MediaSize(num_samples=1))
            placed = PlacedFeature(feature, PlaceholderRange(0, NUM_EMBEDS))
            encoder_token_ids = [0] * NUM_EMBEDS
            return PreparedPrompt(prompt.token_ids, (placed,), ("0" * 64,), prompt, None, encoder_token_ids)
        token_ids, features, items = [], [], iter(prompt.items)
        for token in prompt.token_ids:
            if token != self.image_token:
                token_ids.append(token)
                continue
            item = next(items)
            feature = Feature(item.modality, f"{len(features):064x}", b"", (), MediaSize(width=28, height=28))
            features.append(PlacedFeature(feature, PlaceholderRange(len(token_ids), NUM_EMBEDS)))
            token_ids += [token] * NUM_EMBEDS
        hashes = tuple(placed.feature.mm_hash for placed in features)
        return PreparedPrompt(token_ids, tuple(features), hashes, prompt, None)


class FakeReferences:
    """Those of intake in the current scope; `known` are the contents of uuids, `decoded` what was decoded."""

    def resolve(self, url):
        return current_scope().resolve(url)

    def original_url(self, url):
        return current_scope().resolve(url).client_url

    async def by_uuid(self, url):
        ref = current_scope().resolve(url)
        if not ref.is_alias:
            return ref
        if ref.alias.uuid not in self.known:
            raise UnknownMediaUuid("not known", param=ref.param)
        return msgspec.structs.replace(ref, content=self.known[ref.alias.uuid])

    async def decode_audio(self, url, sample_rate):
        self.decoded.append((self.resolve(url), sample_rate))
        self._fail_at("decode")
        return wave_bytes(self.samples, sample_rate)

    @property
    def text_bytes(self):
        return current_scope().extracted.text_bytes

    @property
    def salt(self):
        return current_scope().text_salt

    def rendering(self):
        return current_scope().timeline.measure("render")


class FakeGeneration:
    """An engine that outputs `tokens`, as `texts` if there are any."""

    def check_ready(self):
        if not self.ready:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=5)

    async def generate(self, request, prepared, continuable=None):
        self.scopes.append(current_scope())
        self.requests.append(request)
        self.prepared.append(prepared)
        try:
            self._fail_at("generate")
            if request.is_pooling:
                yield self._pooled(request, prepared)
                return
            for number, token in enumerate(self.tokens):
                last = number == len(self.tokens) - 1
                text = self.texts.get(token, f"<{token}>")
                completion = CompletionDelta(0, text, [token], finish_reason="stop" if last else None)
                yield OutputDelta(
                    request.request_id,
                    [completion],
                    finished=last,
                    prompt_token_ids=None if number else request.prompt.token_ids,
                    placed=() if number else self.placed,
                )
                await asyncio.sleep(self.token_s)  # time: of one token
                self._fail_at("stream")
        finally:
            self.num_ended += 1

    def has_next(self):
        return next(self.arrivals)

    async def administer(self, call):
        self.calls.append(call)
        self._fail_at("administer")
        return [self.admin_result]

    def fail(self, error):
        current_scope().fail(error)

    def _pooled(self, request, prepared):
        """Two numbers, which depend on the tokens alone; one for a classifier with one label."""
        numbers = [len(request.prompt.token_ids), sum(request.prompt.token_ids)]
        data = np.array(numbers[: 1 if b"classify" in request.sampling_params else 2], np.float32)
        part = PooledPart(TensorSpec("float32", data.shape), data.view(np.uint8).data)
        return OutputDelta(request.request_id, [], finished=True, num_cached_tokens=0, pooled=part)


class FakeBackend(FakePromptMedia, FakeReferences, FakeGeneration):
    """With `placed`, workers expand the prompts, and place their items there. `error_at` is where `error` is raised:
    prepare, generate (before the first token) or stream (after it). `arrivals` say whether an output
    has arrived, each time that the app asks."""

    def __init__(self, image_token: int) -> None:
        self.image_token = image_token
        self.reset()

    def reset(self) -> None:
        self.ready = True
        self.error = None
        self.error_at = ""
        self.token_s = 0.0
        self.arrivals = repeat(False)
        self.tokens, self.texts = [11, 12, 13], {}
        self.prompts, self.prepared, self.requests, self.scopes = [], [], [], []
        self.samples, self.decoded = np.zeros(16000, np.float32), []
        self.num_ended = 0
        self.known = {}
        self.calls, self.admin_result = [], None
        self.placed = ()

    def sending(self, num_bytes):
        return nullcontext()

    async def page(self, query):
        """A medialane endpoint, as `Frontend.app` expects it."""
        if "limit" not in query:
            raise InvalidRequest("limit must be a whole number from 1", param="limit")
        return b'{"decisions":[]}'

    async def publish_images(self, _parameters=None):
        """A medialane endpoint with a body, as `Frontend.app` expects it."""
        if not current_scope().extracted.refs:
            raise InvalidRequest("no images", param="messages")
        self._fail_at("prepare")
        return b'{"images":[]}'

    def _fail_at(self, place):
        if self.error_at == place:
            if isinstance(self.error, PromptRejected):
                current_scope().fail(self.error, app_responds=True)
            raise self.error
