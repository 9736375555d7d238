import base64
import json
import zlib

import pytest

from medialane.transfer.nixl import Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.types.errors import TransferFailed

VALID = {
    "descriptors": [{"device": "cpu", "ptr": 4096, "size": 10}],
    "nixl_metadata": pack_agent_metadata(b"agent"),
    "notification_key": "key",
    "operation_kind": 1,
}


def test_metadata_are_encoded_as_dynamo_encodes_them():
    metadata = RdmaMetadata([Descriptor("cpu", 4096, 10)], pack_agent_metadata(b"agent"), "key")
    found = json.loads(metadata.encode())
    assert found == VALID
    assert found["nixl_metadata"] == "b64:" + base64.b64encode(zlib.compress(b"agent", 6)).decode()
    assert RdmaMetadata.decode(metadata.encode()).agent_metadata() == b"agent"


def test_hexadecimal_metadata_of_earlier_versions_are_decoded():
    found = RdmaMetadata.decode(json.dumps(VALID | {"nixl_metadata": zlib.compress(b"agent").hex()}).encode())
    assert found.agent_metadata() == b"agent"


@pytest.mark.parametrize(
    "changes",
    [
        {"descriptors": []},
        {"descriptors": [{"device": "cpu", "ptr": 0, "size": 10}]},
        {"descriptors": [{"device": "cpu", "ptr": 4096, "size": 0}]},
        {"descriptors": [{"device": "cpu", "ptr": 1 << 64, "size": 10}]},
        {"descriptors": [{"device": "tpu:0", "ptr": 4096, "size": 10}]},
        {"descriptors": [{"device": "cuda", "ptr": 4096, "size": 10}]},
        {"descriptors": [{"device": "cpu", "ptr": 4096, "size": 10, "more": 1}]},
        {"descriptors": [VALID["descriptors"][0], {"device": "cuda:0", "ptr": 4096, "size": 10}]},
        {"descriptors": VALID["descriptors"] * 1025},
        {"notification_key": ""},
        {"operation_kind": 2},
        {"more": 1},
    ],
)
def test_invalid_metadata_are_refused(changes):
    with pytest.raises(TransferFailed):
        RdmaMetadata.decode(json.dumps(VALID | changes).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 10_000])
def test_bytes_that_are_not_metadata_are_refused(data):
    with pytest.raises(TransferFailed):
        RdmaMetadata.decode(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b64:",
        "b64:!!!",
        "b64:" + base64.b64encode(b"not zlib").decode(),
        "b64:" + base64.b64encode(zlib.compress(b"agent")[:-2]).decode(),
        "not hexadecimal",
        pack_agent_metadata(bytes(100 << 10)),
        pack_agent_metadata(bytes(100 << 20)),
    ],
)
def test_invalid_or_huge_agent_metadata_are_refused(text):
    with pytest.raises(TransferFailed):
        RdmaMetadata.decode(json.dumps(VALID | {"nixl_metadata": text}).encode()).agent_metadata()


@pytest.mark.parametrize(
    ("device", "memory_type", "device_id"), [("cpu", "DRAM", 0), ("cuda:3", "VRAM", 3), ("xpu:0", "VRAM", 0)]
)
def test_device_is_translated_to_that_of_nixl(device, memory_type, device_id):
    descriptor = Descriptor(device, 4096, 10)
    assert (descriptor.memory_type, descriptor.device_id) == (memory_type, device_id)
