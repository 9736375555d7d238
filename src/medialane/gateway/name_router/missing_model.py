"""vLLM's answer to a request for a model that it does not have (`BaseServing._check_model`), with the names of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Their endpoints find that the name is no adapter's either (`_maybe_get_adapters`), and do not list the others.
_POOLING = frozenset({
    "/pooling", "/classify", "/score", "/rerank", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank",
    "/v2/embed",
})  # fmt: skip
_ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


def missing_model(path: str, name: str, served: Sequence[str]) -> dict[str, Any]:
    """Return the body of the response, whose status is 404."""
    message, param = f"The model `{name}` does not exist.", None
    if path not in _POOLING:
        message, param = f"{message} Valid aliases: {', '.join(served)}.", "model"
    if path in _ANTHROPIC:
        return {"type": "error", "error": {"type": "NotFoundError", "message": message}}
    return {"error": {"message": message, "type": "NotFoundError", "param": param, "code": 404}}
