import json
from itertools import pairwise

import msgspec
import pytest

from medialane.testing.simulated import SimulatedConfig, SimulatedEngine
from medialane.testing.simulated.sequence import FIRST_ANSWER_TOKEN, NUM_ANSWER_TOKENS, answer_of
from medialane.types.feature import MediaPayload, PlaceholderRange
from medialane.types.request import EngineRequest, ExpandedPrompt

PROMPT = list(range(40))


@pytest.fixture
async def engine():
    made = SimulatedEngine(SimulatedConfig(speedup=1000.0), model="m")
    yield made
    await made.close()


async def completions(engine, tokens=PROMPT, *, generated=(), features=(), **params):
    """The answer's deltas, and its tokens by choice."""
    sampling = msgspec.msgpack.encode({"max_tokens": 30, "output_kind": 1} | params)
    sent = EngineRequest("r", ExpandedPrompt(list(tokens), tuple(features)), sampling, generated=list(generated))
    deltas = [delta async for delta in engine.generate(sent, [])]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    ids = {}
    for delta in deltas:
        for completion in delta.completions:
            ids.setdefault(completion.index, []).extend(completion.token_ids)
    return deltas, ids


async def ids_of(engine, *args, **kwargs):
    _, ids = await completions(engine, *args, **kwargs)
    return ids[0]


async def test_output_is_a_function_of_all_preceding_tokens_media_and_seed(engine):
    image = MediaPayload("image", "hash", b"", (), placeholder=PlaceholderRange(3, 8))
    answers = [
        await ids_of(engine),
        await ids_of(engine, [1, *PROMPT[1:]]),
        await ids_of(engine, [*PROMPT[:-1], 41]),
        await ids_of(engine, features=[image]),
        await ids_of(engine, seed=7),
    ]
    assert answers[0] == answer_of(PROMPT, 30) == await ids_of(engine)
    assert answers[3] == answer_of(PROMPT, 30, ["hash"])
    assert len({tuple(answer) for answer in answers}) == len(answers)


@pytest.mark.parametrize("num_generated", [1, 17, 29])
async def test_output_goes_on_behind_what_was_generated_before(engine, num_generated):
    whole = await ids_of(engine, seed=3)
    deltas, ids = await completions(
        engine, generated=whole[:num_generated], seed=3, max_tokens=30 - num_generated, min_tokens=0
    )
    assert whole[:num_generated] + ids[0] == whole
    assert deltas[-1].completions[0].finish_reason == "length"


def test_a_lost_or_repeated_token_changes_all_that_follow():
    whole = answer_of(PROMPT, 200)
    for wrong in (whole[:50] + whole[51:100], whole[:50] + whole[49:100]):
        after = answer_of([*PROMPT, *wrong], 100)
        assert sum(a == b for a, b in zip(after, whole[100:], strict=True)) < 10
    assert sum(a == b for a, b in pairwise(whole)) < 20


async def test_each_choice_has_its_seed_and_ends_by_itself(engine):
    _, ids = await completions(engine, n=3, seed=5)
    assert ids == {index: await ids_of(engine, seed=5 + index) for index in range(3)}


async def test_stop_token_ends_the_output_once_it_has_min_tokens(engine):
    whole = await ids_of(engine)
    stop = whole[9]
    first = whole.index(stop)
    deltas, ids = await completions(engine, stop_token_ids=[stop])
    assert ids[0] == whole[: first + 1]
    (last,) = deltas[-1].completions
    assert (last.finish_reason, last.stop_reason, last.text) == ("stop", stop, "")
    later = await ids_of(engine, stop_token_ids=[stop], min_tokens=20)
    assert stop not in later[:20]
    assert later[:first] == whole[:first]
    every = list(range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + NUM_ANSWER_TOKENS))
    assert len(await ids_of(engine, stop_token_ids=every, min_tokens=5)) == 1


async def test_text_is_that_of_the_models_vocabulary(tmp_path):
    words = {f"Ġw{number}": number for number in range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + NUM_ANSWER_TOKENS)}
    del words[f"Ġw{FIRST_ANSWER_TOKEN}"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": words}}))
    engine = SimulatedEngine(SimulatedConfig(speedup=1000.0), model=str(tmp_path))
    deltas, ids = await completions(engine, max_tokens=600)
    texts = [f"<{token}>" if token == FIRST_ANSWER_TOKEN else f" w{token}" for token in ids[0]]
    assert "".join(delta.completions[0].text for delta in deltas) == "".join(texts)
    assert f"<{FIRST_ANSWER_TOKEN}>" in texts
    silent, _ = await completions(engine, detokenize=False)
    assert not any(delta.completions[0].text for delta in silent)
    await engine.close()
