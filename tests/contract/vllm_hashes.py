"""The hashes that vLLM itself gives to the media of a prompt."""


def vllm_hashes(processor, inputs):
    """Return the hashes by modality. No public method of a processor returns them without processing the items."""
    return processor._get_mm_hashes(inputs)  # vLLM's own
