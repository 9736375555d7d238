"""vLLM's own render server, in this process, and a backend that prepares items as a gateway with its store does."""

import httpx
import msgspec
import pytest
from fake_backend import FakeBackend
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.render.app_state import init_render_app_state

from medialane.media import MediaConfig, decode, sniff
from medialane.types.feature import Feature, PlacedFeature, PreparedPrompt
from medialane.types.hashing import content_hash, feature_key, merged_options
from medialane.types.media import MediaRef
from medialane.vllm_bridge.items import VllmFrameSampler
from model_parts import request_processor
from vllm_configs import vllm_args as parsed


class PlainRender:
    """Started by `start`, stopped by `close`."""

    @classmethod
    async def start(cls, model, vllm_args):
        render = cls()
        args = parsed(model, vllm_args)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = VllmConfig(
            model_config=engine_args.create_model_config(),
            logging_config=engine_args.create_logging_config(),
            structured_outputs_config=engine_args.create_structured_outputs_config(),
        )
        app = build_app(args, ("render",))
        await init_render_app_state(config, app.state, args)
        render.renderer = app.state.online_renderer.renderer
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        render.client = httpx.AsyncClient(transport=transport, base_url="http://plain", headers={})
        return render

    async def post(self, path, body):
        with pytest.MonkeyPatch.context() as patch:  # the other app of this process has another one
            patch.setenv("VLLM_MEDIA_CONNECTOR", "http")
            return await self.client.post(path, json=body)

    async def close(self):
        await self.client.aclose()
        self.renderer.shutdown()


class PreparingBackend(FakeBackend):
    """Prepares items of data as a store does, and expands prompts. With `predicts`, `describe` returns no tensors, as
    for items that nobody has processed; `num_prepared` counts the others. With `is_unexpanded`, only a worker can
    place the items of a prompt."""

    def __init__(self, frontend):
        super().__init__(image_token=0)
        profile = frontend.profile
        self._sampler = VllmFrameSampler(frontend.config.model_config, max_sampled_frames=64)
        self._processor = request_processor(profile, self._sampler)
        self._assembler = profile.assembler(max_tokens=frontend.config.model_config.max_model_len)
        self._tensors = {}
        self.predicts, self.num_prepared = True, 0
        self.is_unexpanded = False
        self.referred = []

    async def prepare(self, prompt, *, with_tensors=False):
        self.num_prepared += len(prompt.items)
        if self.is_unexpanded:
            return self._unexpanded(prompt)
        return self._placed(prompt, [self._feature(ref, prompt.options) for ref in prompt.items])

    def _unexpanded(self, prompt):
        return PreparedPrompt(prompt.token_ids, (), ("0" * 64,), prompt, None)

    async def describe(self, prompt):
        if self.is_unexpanded:
            return self._unexpanded(prompt)
        features = [self._feature(ref, prompt.options) for ref in prompt.items]
        if self.predicts:
            features = [msgspec.structs.replace(feature, tensors=()) for feature in features]
        else:
            self.num_prepared += len(prompt.items)
        prepared = self._placed(prompt, features)
        return msgspec.structs.replace(prepared, is_predicted=self.predicts)

    async def refer(self, prepared):
        self.referred.append(prepared)
        return await super().refer(prepared)

    def tensors(self, feature):
        return self._tensors[feature.mm_hash]

    def _feature(self, ref: MediaRef, options: bytes):
        data = memoryview(ref.data)
        config = MediaConfig()
        media_type = sniff(data, ref.modality, config)
        decoded = decode(data, ref.modality, media_type=media_type, io=ref.io, config=config, sampler=self._sampler)
        merged = merged_options(options, ref.options)
        item = self._processor.process(decoded, merged)
        key = feature_key(processor="", content=content_hash(ref.data), io=ref.io, options=merged, salt=ref.salt)
        self._tensors[key] = list(item.buffers)
        return Feature(ref.modality, key, item.header, (), item.size)

    def _placed(self, prompt, features):
        assembled = self._assembler.assemble(prompt.token_ids, tuple(features), prompt.options)
        placed = tuple(map(PlacedFeature, features, assembled.placeholders))
        hashes = tuple(feature.mm_hash for feature in features)
        return PreparedPrompt(
            assembled.token_ids, placed, hashes, prompt, None, encoder_token_ids=assembled.encoder_token_ids
        )
