"""What the tokenizer of mistral_common gets of a chat's media."""

import pytest

from medialane.vllm_bridge.items.mistral_chat import blank_part, with_blanks

TEXT = {"type": "text", "text": "Look"}


@pytest.mark.parametrize(
    "opened",
    [
        {"type": "image_url", "image_url": "http://host.example/a.png"},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "audio_url", "audio_url": {"url": "http://host.example/a.wav"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "image", "url": "http://host.example/a.png"},
        {"type": "image", "path": "/etc/hostname"},
        {"type": "audio", "path": "/etc/hostname"},
        {"type": "audio", "url": "http://host.example/a.wav"},
        {
            "type": "audio",
            "url": "http://host.example/a.wav",
            "tool_reference": "text to vLLM",
            "name": "x",
            "uuid": "u",
        },
        {"type": ["image_url"], "image_url": {"url": "http://host.example/a.png"}},
        {"image_url": {"url": "http://host.example/a.png"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_tokenizer_gets_nothing_of_a_client_to_open(opened, role):
    (message,) = with_blanks([{"role": role, "content": iter([TEXT, opened])}])
    assert message["role"] == role
    assert message["content"][0] == TEXT
    assert not any(word in str(message) for word in ("host.example", "/etc", "UklGRg=="))


@pytest.mark.parametrize(
    ("part", "modality"),
    [
        ({"type": "image_url", "image_url": {"url": "medialane:0"}}, "image"),
        ({"type": "image_url", "image_url": None, "uuid": "medialane:0"}, "image"),
        ({"type": "audio_url", "audio_url": {"url": "medialane:0"}}, "audio"),
        ({"type": "input_audio", "input_audio": {"data": "medialane:0", "format": "mp3"}}, "audio"),
    ],
    ids=str,
)
def test_each_item_becomes_a_blank_in_its_place(part, modality):
    messages = [{"role": "user", "content": [part, TEXT, part]}, {"role": "assistant", "content": "A pier."}]
    blank = blank_part(modality)
    assert with_blanks(messages) == [{"role": "user", "content": [blank, TEXT, blank]}, messages[1]]


def test_messages_of_the_request_are_not_changed():
    part = {"type": "image_url", "image_url": {"url": "medialane:0"}}
    message = {"role": "user", "content": [part]}
    with_blanks([message])
    assert message == {"role": "user", "content": [part]}
