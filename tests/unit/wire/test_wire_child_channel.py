"""Both ends of a channel between a process and its child."""

import os

import msgspec
import pytest

from medialane.wire import ChannelToChild
from medialane.wire.child_channel import child_channel, receive, send
from waiting import eventually

MAX_BYTES = 1000


class Text(msgspec.Struct, tag=True):
    text: str


DECODE = msgspec.msgpack.Decoder(Text).decode


class Parent:
    """`messages`: each with the number of its descriptors."""

    def __init__(self):
        ours, self.theirs = child_channel()
        self.messages, self.losses = [], []
        self.channel = ChannelToChild(ours, DECODE, self._handle, self._lose, max_bytes=MAX_BYTES)

    def _handle(self, message, descriptors):
        for descriptor in descriptors:
            os.close(descriptor)
        if message.text == "unexpected":
            raise LookupError
        self.messages.append((message.text, len(descriptors)))

    def _lose(self, reason):
        self.losses.append(reason)
        self.channel.close()


@pytest.fixture
async def ends():
    parent = Parent()
    yield parent
    parent.channel.close()
    parent.theirs.close()


async def test_messages_pass_in_both_directions_with_descriptors(ends):
    assert ends.channel.send(Text("request"), [ends.theirs.fileno()])
    message, (descriptor,) = receive(ends.theirs, DECODE, max_bytes=MAX_BYTES)
    assert message == Text("request")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    send(ends.theirs, Text("report"), max_bytes=MAX_BYTES)
    send(ends.theirs, Text("another"), [ends.theirs.fileno()], max_bytes=MAX_BYTES)
    await eventually(lambda: ends.messages == [("report", 0), ("another", 1)])
    assert not ends.losses


async def test_too_large_message_is_refused_by_its_sender(ends):
    with pytest.raises(ValueError, match="exceeds the limit of 1000"):
        ends.channel.send(Text("x" * MAX_BYTES))
    assert not ends.losses


async def test_closed_end_is_lost_without_a_reason_and_gives_none_to_the_child(ends):
    other = Parent()
    other.channel.close()
    assert receive(other.theirs, DECODE, max_bytes=MAX_BYTES) == (None, [])
    other.theirs.close()
    ends.theirs.close()
    await eventually(lambda: ends.losses == [""])
    assert not ends.channel.is_open
    assert not ends.channel.send(Text("late"))


@pytest.mark.parametrize("packet", [b"\xc1", msgspec.msgpack.encode(Text("unexpected")), bytes(2 * MAX_BYTES)])
async def test_malformed_unexpected_or_truncated_message_loses_the_channel(ends, packet):
    ends.theirs.send(packet)
    await eventually(lambda: ends.losses)
    assert "protocol violation" in ends.losses[0]
    assert not ends.channel.is_open


async def test_child_that_does_not_read_is_lost(ends):
    while ends.channel.send(Text("x" * 900)):
        pass
    assert "accepts no requests" in ends.losses[0]
