"""Sampling parameters of requests that only encode."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind, SamplingParams

from medialane.vllm_bridge.seams.engine import MsgpackEncoder


def encode_params() -> bytes:
    """Return the parameters of a request to an encoder, in the engine's encoding.

    An encode-only engine samples nothing: it ends the request, with finish reason `stop`, once its items are encoded.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    (encoded,) = MsgpackEncoder().encode(params)
    return bytes(encoded)
