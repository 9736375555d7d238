"""What a client sends that publishes an image with `nixl_connect`: a data: URL."""

import base64

import msgspec

from medialane.media import RDMA_TYPE


def published_url(rdma_metadata: bytes, height: int, width: int) -> str:
    document = {"rdma_metadata": msgspec.Raw(rdma_metadata), "shape": [height, width, 3]}
    return f"data:{RDMA_TYPE};base64,{base64.b64encode(msgspec.json.encode(document)).decode()}"
