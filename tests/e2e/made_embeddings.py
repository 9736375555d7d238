"""Media items without a file: embeddings that a client has made."""

import base64
import io

import torch

#: Of the tiny model.
HIDDEN = 128


def saved(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def embeds(seed: int, *, rows: int = 24, grid: tuple[int, int, int] = (1, 8, 12), **more):
    """An image of `grid` patches as the embeddings that an encoder could have made of it."""
    values = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    fields = {"image_embeds": saved(values), "image_grid_thw": saved(torch.tensor(grid))}
    return {"type": "image_embeds", "image_embeds": fields, **more}
