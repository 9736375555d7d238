"""LoRA adapters of a real engine whose files are replaced. The engine keeps one, and reads others again."""

import asyncio
import tempfile
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from prompt_maker import PromptMaker, encoded
from vllm.lora.request import LoRARequest
from vllm.v1.serial_utils import MsgpackEncoder

from adapter_files import FLAGS, write_adapter
from conftest import VLLM_ARGS
from medialane.types.admin import AddLora, UnloadLora
from medialane.types.errors import AdapterChanged, GenerationFailed
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.vllm_bridge.engine.adapters import versioned

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm]


def lora_bytes(lora):
    return bytes(MsgpackEncoder().encode(lora)[0])


class Engine:
    def __init__(self, engine, text, folder):
        """`folder` is that of the engine's own folder."""
        self.engine, self._text, self._folder = engine, text, folder
        self._num_requests = 0

    async def load(self, path, name="sql"):
        """Returns what requests name it by."""
        lora = LoRARequest(name, 1, str(path))
        return versioned(lora, await self.engine.administer(AddLora(lora_bytes(lora))))

    def request(self, lora, **fields):
        self._num_requests += 1
        made = EngineRequest(f"r{self._num_requests}", self._text, encoded(max_tokens=fields.pop("max_tokens", 24)))
        return msgspec.structs.replace(made, lora=lora_bytes(lora), **fields)

    async def answer(self, lora, **fields):
        """Token ids, and the number of tokens from the prefix cache."""
        async with aclosing(self.engine.generate(self.request(lora, **fields), [])) as deltas:
            found = [delta async for delta in deltas]
        ids = [token for delta in found for part in delta.completions for token in part.token_ids]
        return ids, found[0].num_cached_tokens

    def copies(self):
        return list(self._folder.glob("*/adapter-*"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model, renderer):
    from medialane.vllm_bridge.engine.engine import build_engine

    args = [arg for arg in VLLM_ARGS if not arg.startswith("--mm-processor-cache")]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as paths of sockets must be
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
            patch.setenv("VLLM_RPC_BASE_PATH", folder)
            engine = build_engine(str(tiny_model), [*args, "--dtype=float32", *FLAGS])
        await engine.learn_encoder()
        tokenizer = PromptMaker(renderer).tokenizer
        text = tokenizer.encode("<|im_start|>user\n" + "hello there " * 100 + "<|im_end|>\n")
        yield Engine(engine, ExpandedPrompt(text), Path(folder))
        await engine.close()


async def test_weights_that_replaced_others_at_their_path_answer_after_a_load(engine, tmp_path):
    first = await engine.load(write_adapter(tmp_path / "a", 1))
    old, _ = await engine.answer(first)
    assert (await engine.answer(first))[1] > 0
    right, _ = await engine.answer(await engine.load(write_adapter(tmp_path / "b", 2), "other"))
    assert right != old

    write_adapter(tmp_path / "a", 2)
    assert (await engine.answer(first))[0] == old, "nothing was loaded yet, and the engine had evicted it"
    second = await engine.load(tmp_path / "a")
    assert (second.lora_int_id, second.lora_name) != (first.lora_int_id, first.lora_name)
    assert await engine.answer(second) == (right, 0), "no block of the old weights is used"
    assert await engine.load(tmp_path / "a") == second


async def test_running_answers_end_with_the_weights_that_they_began_with(engine, tmp_path):
    first = await engine.load(write_adapter(tmp_path / "a", 3))
    old, _ = await engine.answer(first, max_tokens=200)
    running = asyncio.create_task(engine.answer(first, max_tokens=200))
    await asyncio.sleep(0.2)  # time: the answer has begun, and takes seconds
    second = await engine.load(write_adapter(tmp_path / "a", 4))
    await engine.engine.administer(UnloadLora("sql", second.lora_name.partition("@")[2]))
    (new, _), (ended, _) = await asyncio.gather(engine.answer(second, max_tokens=200), running)
    assert ended == old
    assert new != old


async def test_request_with_a_replaced_version_gets_the_latest_unless_it_continues_an_answer(engine, tmp_path):
    first = await engine.load(write_adapter(tmp_path / "a", 5))
    second = await engine.load(write_adapter(tmp_path / "a", 6))
    await engine.engine.administer(UnloadLora("sql", second.lora_name.partition("@")[2]))
    right, _ = await engine.answer(second)
    assert (await engine.answer(first))[0] == right
    with pytest.raises(AdapterChanged):
        await engine.answer(first, generated=[5])


async def test_unloaded_adapter_leaves_nothing_and_is_loaded_again_only_if_it_is_the_same(engine, tmp_path):
    first = await engine.load(write_adapter(tmp_path / "a", 7))
    right, _ = await engine.answer(first)
    for name in ("sql", "other"):
        await engine.engine.administer(UnloadLora(name))
    assert engine.copies() == []
    assert (await engine.answer(first))[0] == right
    await engine.engine.administer(UnloadLora("sql"))
    write_adapter(tmp_path / "a", 8)
    with pytest.raises(AdapterChanged, match="'sql' have changed"):
        await engine.answer(first)
    assert engine.copies() == []


async def test_errors_are_of_the_adapters_own_name_and_path(engine, tmp_path):
    with pytest.raises(GenerationFailed, match=f"No adapter found for {tmp_path}/missing"):
        await engine.load(tmp_path / "missing")
    write_adapter(tmp_path / "a", 9)
    (tmp_path / "a/adapter_model.safetensors").unlink()
    with pytest.raises(GenerationFailed, match=f"{tmp_path}/a doesn't contain tensors"):
        await engine.load(tmp_path / "a")
    assert engine.copies() == []
