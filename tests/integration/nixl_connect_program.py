"""One end of NVIDIA Dynamo's `nixl_connect`: `python nixl_connect_program.py publish|read SIZE...`.

`publish` writes the RdmaMetadata of tensors of these sizes, then "completed" when they have been read. `read` reads a
line of RdmaMetadata into tensors of these sizes. Both write the SHA-256 of the tensors.
"""

import asyncio
import hashlib
import sys

import torch
from dynamo.nixl_connect import Connector, Descriptor, RdmaMetadata


async def main(command: str, sizes: list[int]) -> None:
    connector = Connector()
    tensors = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in sizes]
    if command == "read":
        tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    descriptors = [Descriptor(tensor) for tensor in tensors]
    if command == "publish":
        operation = await connector.create_readable(descriptors)
        say(operation.metadata().model_dump_json())
    else:
        metadata = RdmaMetadata.model_validate_json(sys.stdin.readline())
        operation = await connector.begin_read(metadata, descriptors)
    await operation.wait_for_completion()
    say("completed")
    say(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


asyncio.run(main(sys.argv[1], [int(size) for size in sys.argv[2:]]))
