"""The files that can be replayed, and the requests that become of them."""

import base64
import io
import json
import wave

import pytest
from PIL import Image

from medialane.compare.formats import read_traffic
from medialane.compare.traffic import UnusableLine
from medialane.core.errors import StartupFailed

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def read(path, **options):
    return read_traffic(path, media=path.parent / "media", **options)


def asks(path, **options):
    traffic = read(path, **options)
    return traffic, [request.make() for request in traffic.requests]


def picture(url):
    kind, _, data = url.partition(";base64,")
    assert kind == "data:image/jpeg"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def batch(number, content="hello", **members):
    body = {"model": "theirs", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body, **members}


def test_batch_file_is_read_as_it_is(traffic_file):
    traffic, made = asks(traffic_file(batch(0), batch(1, url="https://api.openai.com/v1/chat/completions")))
    assert (traffic.format, traffic.is_timed) == ("OpenAI batch", False)
    assert [request.id for request in traffic.requests] == ["r0", "r1"]
    assert [ask.path for ask in made] == [CHAT, CHAT]
    assert made[0].body == batch(0)["body"]


def test_recording_has_times_and_media_of_the_recorded_sizes(traffic_file):
    url = "medialane:sample/image/{}?width=96&height=64&num_bytes=9"
    parts = [{"type": "image_url", "image_url": {"url": url.format(key)}} for key in ("aa", "bb", "aa")]
    audio = {"type": "input_audio", "input_audio": {"data": "medialane:sample/audio/cc?num_samples=8000"}}
    later, earlier = batch(0, [*parts, audio], medialane={"at": 102.5}), batch(1, medialane={"at": 100.0})
    traffic, made = asks(traffic_file(later, earlier))
    assert traffic.format == "recording"
    assert [(request.id, request.at_s) for request in traffic.requests] == [("r1", 0.0), ("r0", 2.5)]
    first, other, again, sound = made[1].body["messages"][0]["content"]
    assert picture(first["image_url"]["url"]).size == (96, 64)
    assert first == again != other
    with wave.open(io.BytesIO(base64.b64decode(sound["input_audio"]["data"]))) as file:
        assert file.getnframes() == 8000


@pytest.mark.parametrize("url", ["medialane:sample/image/zz", "medialane:sample/image/aa?width=9999999999"])
def test_stand_in_that_is_none_names_its_line(traffic_file, url):
    line = batch(0, [{"type": "image_url", "image_url": {"url": url}}], medialane={"at": 1.0})
    traffic = read(traffic_file(line))
    with pytest.raises(UnusableLine, match=r"traffic\.jsonl, line 1: medialane:sample"):
        traffic.requests[0].make()


def test_recording_that_ends_within_a_line_is_read_up_to_there(traffic_file):
    path = traffic_file(batch(0), batch(1))
    path.write_text(path.read_text()[:-20])
    traffic = read(path)
    assert len(traffic.requests) == 1
    assert any(note.startswith("line 2 is left out") for note in traffic.notes)


def test_bodies_alone_are_chat_completions(traffic_file):
    traffic, (ask,) = asks(traffic_file({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}))
    assert (traffic.format, ask.path, ask.body["max_tokens"]) == ("chat bodies", CHAT, 3)


def test_mooncake_trace_has_its_lengths_times_and_common_blocks(traffic_file):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 3052, "input_length": 1000, "output_length": 7, "hash_ids": [0, 5]},
    ]
    traffic, (first, second) = asks(traffic_file(*rows))
    assert traffic.format == "Mooncake trace"
    assert [request.at_s for request in traffic.requests] == [0.0, 3.052]
    assert (first.path, len(first.body["prompt"]), first.body["max_tokens"]) == (COMPLETIONS, 1100, 50)
    assert len(second.body["prompt"]) == 1000
    assert first.body["prompt"][:512] == second.body["prompt"][:512]
    assert first.body["prompt"][512:1000] != second.body["prompt"][512:]


def test_bailian_trace_has_blocks_of_16_tokens_and_seconds(traffic_file):
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 9, "turn": 1}
    traffic, made = asks(
        traffic_file({**row, "hash_ids": [7, 8, 9]}, {**row, "timestamp": 63.0, "hash_ids": [7, 8, 1]})
    )
    assert (traffic.format, traffic.requests[1].at_s) == ("Qwen-Bailian trace", 1.5)
    first, second = (ask.body["prompt"] for ask in made)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_servegen_offline_trace_shows_equal_images_for_equal_ids(traffic_file):
    row = {"type": "multimodal", "input_length": 30, "hash_ids": [5, 6]}
    traffic, made = asks(
        traffic_file(
            {"request_id": 0, **row, "img_ids": ["img_1"]},
            {"request_id": 1, **row, "img_ids": ["img_2"]},
            {"request_id": 2, **row, "img_ids": ["img_1"]},
        )
    )
    assert (traffic.format, traffic.is_timed) == ("ServeGen offline trace", False)
    one, other, same = (ask.body["messages"][0]["content"][0]["image_url"]["url"] for ask in made)
    assert one == same != other
    assert len(made[0].body["messages"][0]["content"][1]["text"].split()) == 30


def test_servegen_offline_trace_of_lengths_has_answers_of_these(traffic_file):
    rows = [{"request_id": n, "type": "text", "input_length": 61, "output_length": 5, "duration": 14} for n in (0, 1)]
    _, (first, second) = asks(traffic_file(*rows))
    assert (len(first.body["prompt"]), first.body["max_tokens"], first.body["ignore_eos"]) == (61, 5, True)
    assert first.body["prompt"] != second.body["prompt"]


def test_servegen_workload_has_images_of_so_many_tokens(tmp_path):
    path = tmp_path / "workload.csv"
    path.write_text(
        'request_id,timestamp,text_tokens,output_tokens,image_tokens\n0,10.5,41,6,"[256, 64]"\n1,11.0,12,3,[]\n'
    )
    traffic, (first, second) = asks(path)
    assert (traffic.format, traffic.requests[1].at_s) == ("ServeGen workload", 0.5)
    urls = [part["image_url"]["url"] for part in first.body["messages"][0]["content"][:2]]
    assert [picture(url).size for url in urls] == [(448, 448), (224, 224)]
    assert (second.path, len(second.body["prompt"])) == (COMPLETIONS, 12)


def test_burstgpt_trace_is_read(tmp_path):
    path = tmp_path / "BurstGPT.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,Conversation log\n"
    )
    traffic, (ask,) = asks(path)
    assert (traffic.format, len(ask.body["prompt"]), ask.body["max_tokens"]) == ("BurstGPT trace", 472, 18)


def test_datasets_of_vllm_bench_have_their_files(traffic_file, tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    parts = [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]
    for line, name in (
        ({"prompt": "what?", "image_files": ["a.png"]}, "vllm bench custom"),
        ({"content": parts}, "vllm bench custom_image"),
    ):
        traffic, (ask,) = asks(traffic_file(line))
        assert (traffic.format, ask.path) == (name, CHAT)
        urls = [part["image_url"]["url"] for part in ask.body["messages"][0]["content"] if "image_url" in part]
        assert urls == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]


def test_custom_dataset_has_its_output_length(traffic_file):
    _, (ask,) = asks(traffic_file({"prompt": "capital of India?", "output_tokens": 10}))
    assert ask.body == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "capital of India?"}]}],
        "max_tokens": 10,
    }


def test_sharegpt_is_a_list_of_conversations(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": [{"value": "Hi there"}, {"value": "a" * 40}]}] * 3))
    traffic, made = asks(path, limit=2)
    assert (traffic.format, len(made)) == ("vllm bench sharegpt", 2)
    assert made[0].body["max_tokens"] == 10


def test_missing_file_of_a_dataset_is_named(traffic_file):
    traffic = read(traffic_file({"prompt": "p", "image_files": ["gone.png"]}))
    with pytest.raises(UnusableLine, match=r"line 1: .*gone\.png: No such file"):
        traffic.requests[0].make()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no request in it"),
        ('{"weather": 1}\n', "line 1 has weather: none of the known formats"),
        ("not json\n" * 30, "is not JSONL: line 1 is left out"),
        ('{"timestamp": "soon", "input_length": 1, "output_length": 1, "hash_ids": []}\n', "timestamp is 'soon'"),
    ],
)
def test_file_that_is_none_is_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "f.jsonl"
    path.write_text(content)
    with pytest.raises(StartupFailed, match=message):
        read(path)


def test_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StartupFailed, match=r"--requests .*gone\.jsonl: No such file"):
        read(tmp_path / "gone.jsonl")
