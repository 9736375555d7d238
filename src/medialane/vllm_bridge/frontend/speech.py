"""Transcription and translation: vLLM's endpoints over files that the store has decoded.

vLLM's handlers decode an upload in the server's process, and cut long audio into clips at quiet places. Intake has
replaced the upload by a reference. The store decodes it, in a sandboxed process, at the model's sample rate, and
vLLM's own code gets the result as a file of the exact samples, written by us: it cuts it into clips, each of which
becomes a media item of the model's prompt (`renderer_hook`).
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket
from vllm import envs

from medialane.types.errors import InvalidUpload, TooLarge, UnsupportedMediaType
from medialane.types.media import MediaRef
from medialane.vllm_bridge.frontend.renderer_hook import remembered_errors
from medialane.vllm_bridge.frontend.request_backend import MediaReferences, RequestBackend
from medialane.vllm_bridge.seams.api_server import ToClips, decode_speech_by

#: The path of vLLM's WebSocket for transcription in real time.
REALTIME = "/v1/realtime"

_NO_REALTIME = "transcription in real time is not supported by this gateway: use /v1/audio/transcriptions"


def install(app_state: Any, backend: RequestBackend) -> None:
    """Have `backend` decode the uploads of the app's speech endpoints."""

    def wrap(to_clips: ToClips, sample_rate: float) -> ToClips:
        async def decoded_by_store(upload: bytes) -> Any:
            url = upload.decode("ascii", "replace")  # not a reference if intake could not parse the form
            with remembered_errors(backend):
                _check_size(backend.resolve(url))
                wave = await _decoded(backend, url, round(sample_rate))
            return await to_clips(wave)

        return decoded_by_store

    decode_speech_by(app_state, wrap)


async def _decoded(backend: MediaReferences, url: str, sample_rate: int) -> bytes:
    """Raises InvalidUpload where the media of a chat get another status."""
    try:
        return await backend.decode_audio(url, sample_rate)
    except (TooLarge, UnsupportedMediaType) as error:
        raise InvalidUpload(error.message, param=error.param) from error


def _check_size(ref: MediaRef) -> None:
    """Apply vLLM's limit, which its own check has compared with the size of the reference."""
    limit = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB << 20
    if len(ref.data or b"") > limit:
        raise InvalidUpload(f"the file has {len(ref.data or b'')} bytes, more than {limit}", param=ref.param)


async def refuse_realtime(websocket: WebSocket) -> None:
    """Answer the handshake for transcription in real time; without a route it would be 403."""
    error = {"message": _NO_REALTIME, "type": "NotImplementedError", "param": None, "code": 501}
    await websocket.send_denial_response(JSONResponse({"error": error}, 501))
