"""medialane: a multimodal gateway and zero-copy data plane for vLLM clusters."""

__version__ = "0.1.0"
