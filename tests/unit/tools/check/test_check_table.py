import io

import msgspec
from rich.console import Console

from medialane.tools.check import CaseResult, CheckReport, show

EQUAL = CaseResult("chat", "one image", "equal", 200, 200, stage="features", transport="shm", cache="miss")
REFUSED = CaseResult("chat", "image that is damaged", "refused", 400, 400, detail="400: damaged")
DIFFERS = CaseResult("chat", "two of image", "differs", 200, 400, detail="400: [unknown] instead of 200")


def shown(*results, **options):
    out = io.StringIO()
    report = CheckReport("./m", "1", "2", (), ("chat",), {"image": 2}, results, seconds=61.0, **options)
    show(report, Console(file=out, width=120))
    return out.getvalue()


def test_every_case_has_a_row_and_differences_a_line_of_their_own():
    text = shown(EQUAL, REFUSED, DIFFERS, notes=("medialane logged: stage decoded",))
    rows = [line for line in text.splitlines() if line.startswith("│ chat")]
    assert len(rows) == 3
    assert "features (shm)" in rows[0]
    assert "refused (400)" in rows[1]
    assert "differs: chat, two of image: 400: [unknown] instead of 200" in text
    assert "note: medialane logged: stage decoded" in text
    assert "in stage features (shm): 1 of 3 cases" in text
    assert "./m: 3 cases in 61 s: 1 equal, 1 refused, 1 differs" in text


def test_what_became_of_embeddings_is_shown():
    loaded = msgspec.structs.replace(EQUAL, embeddings=("loaded",))
    assert "embeddings loaded: in 2 of 3 cases" in shown(loaded, REFUSED, loaded)
    assert "embeddings are not kept: too odd" in shown(EQUAL, no_embeddings="too odd")


def test_media_whose_size_is_enough_are_named():
    assert "prompts are known from the size of media: audio, image" in shown(EQUAL, predicted=("audio", "image"))


def test_refusals_alone_are_named_as_such():
    assert "plain vLLM has answered none of them" in shown(REFUSED)


def test_prompts_that_were_computed_twice_are_named():
    read = msgspec.structs.replace(EQUAL, prefill="split", transferred_tokens=100)
    text = shown(read, msgspec.structs.replace(read, case="a video", transferred_tokens=0))
    assert "computed twice: chat, a video" in text
    assert "computed twice: chat, one image" not in text
    assert "1 prompts were computed by both workers" in text


def test_prompts_that_were_not_split_are_named_as_such():
    assert "no prompt was computed by the worker for that" in shown(msgspec.structs.replace(EQUAL, prefill="failed"))
