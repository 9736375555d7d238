"""Recordings and batch files, and the requests that become of them."""

import base64
import io
import json
import wave

import pytest
from PIL import Image

from medialane.tools.compare import UnusableLine, read_traffic
from medialane.types.errors import StartupFailed

CHAT = "/v1/chat/completions"


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
    assert any(note.startswith("left out: line 2: ") for note in traffic.notes)


def test_lines_left_out_are_counted_and_the_first_shown(traffic_file):
    traffic = read(traffic_file(*map(batch, range(20)), *[{"weather": 1}] * 15))
    assert len(traffic.requests) == 20
    assert traffic.notes[0] == "left out: line 21: Object missing required field `url`"
    assert traffic.notes[-1] == "left out: 5 more lines"


def test_limit_counts_requests_whatever_the_lines_between(traffic_file):
    path = traffic_file(batch(0), {"weather": 1}, batch(1), batch(2))
    path.write_text("\n" + path.read_text())
    traffic = read(path, limit=2)
    assert [request.id for request in traffic.requests] == ["r0", "r1"]
    assert traffic.notes == ("left out: line 3: Object missing required field `url`",)


def test_times_count_only_if_each_line_has_one(traffic_file):
    traffic = read(traffic_file(batch(0, medialane={"at": 2.0}), batch(1), batch(2, medialane={"at": 1.0})))
    assert [(request.id, request.at_s) for request in traffic.requests] == [("r0", None), ("r1", None), ("r2", None)]


@pytest.mark.parametrize("body", ["text", [1], None])
def test_body_that_is_no_object_names_its_line(traffic_file, body):
    traffic = read(traffic_file(batch(0), batch(1, body=body)))
    with pytest.raises(UnusableLine, match=r"traffic\.jsonl, line 2: Expected `object`"):
        traffic.requests[1].make()


def test_line_that_is_gone_when_its_turn_comes_is_named(traffic_file):
    path = traffic_file(batch(0), batch(1))
    traffic = read(path)
    path.write_text("")
    with pytest.raises(UnusableLine, match=r"traffic\.jsonl, line 2: "):
        traffic.requests[1].make()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no request in it"),
        ('{"weather": 1}\n', "neither a recording nor an OpenAI batch file: line 1: .*`url`"),
        ("not json\n" * 30, "neither a recording nor an OpenAI batch file: line 1: "),
        (json.dumps([batch(0)]), "line 1: Expected `object`, got `array`"),
        (json.dumps(batch(0, url="nowhere")), "line 1: url is 'nowhere', which has no path"),
        (json.dumps(batch(0, url="http://[")), "line 1: Invalid IPv6 URL"),
        (json.dumps(batch(0, medialane={"at": "soon"})), r"line 1: .*`\$.medialane.at`"),
        (json.dumps(batch(0, medialane={"at": 1, "format": 2})), "line 1: it was recorded by another"),
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
