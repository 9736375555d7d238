"""curl: bytes as they are sent and received, without a client that interprets them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from recorded import MAX_TOKENS, QUESTION, Calls, settings

server = settings()
calls = Calls(lambda error: {"message": str(error)})

CHAT = "/v1/chat/completions"
KEY = ("-H", f"Authorization: Bearer {server.key}") if server.key else ()
JSON = ("-H", "Content-Type: application/json")
#: After the body: what is known of the response.
WRITTEN = "\n%{http_code} %{content_type} %{num_redirects}"


def curl(path: str, *flags: str, body: bytes = b"") -> dict[str, Any]:
    """The status, type and body of a response; `body` is what `--data-binary @-` sends."""
    command = ["curl", "-sS", "--max-time", "60", "-w", WRITTEN, *KEY, *flags, server.base_url + path]
    done = subprocess.run(command, input=body, capture_output=True, check=True)
    text, _, about = done.stdout.decode().rpartition("\n")
    return {"about": about, "body": interpreted(text)}


def interpreted(text: str) -> Any:
    """JSON, the events of a stream, or the text itself."""
    if text.startswith(("data: ", "event: ")):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [lines[-1:], {"stream": [json.loads(line) for line in lines if line.startswith("{")]}]
    try:
        return json.loads(text)
    except ValueError:
        return text


def ask(**options: Any) -> bytes:
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": server.data_url()}},
    ]
    made = {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}
    return json.dumps({**made, "temperature": 0, **options}).encode()


@calls
def chat() -> Any:
    return curl(CHAT, *JSON, "--data-binary", "@-", body=ask())


@calls
def stream() -> Any:
    return curl(CHAT, *JSON, "-N", "--data-binary", "@-", body=ask(stream=True))


@calls
def body_in_chunks() -> Any:
    return curl(CHAT, *JSON, "-H", "Transfer-Encoding: chunked", "--data-binary", "@-", body=ask())


@calls
def body_after_a_100() -> Any:
    return curl(CHAT, *JSON, "-H", "Expect: 100-continue", "--data-binary", "@-", body=ask())


@calls
def compressed_answer_accepted() -> Any:
    return curl(CHAT, *JSON, "--compressed", "--data-binary", "@-", body=ask())


@calls
def http_1_0() -> Any:
    return curl(CHAT, *JSON, "--http1.0", "--data-binary", "@-", body=ask())


@calls
def stream_by_http_1_0() -> Any:
    return curl(CHAT, *JSON, "--http1.0", "-N", "--data-binary", "@-", body=ask(stream=True))


@calls
def http_2_asked_for() -> Any:
    return curl(CHAT, *JSON, "--http2", "--data-binary", "@-", body=ask())


@calls
def form_instead_of_json() -> Any:
    return curl(CHAT, "--data", "model=none")


@calls
def no_type() -> Any:
    return curl(CHAT, "-H", "Content-Type:", "--data-binary", "@-", body=ask())


@calls
def no_json() -> Any:
    return curl(CHAT, *JSON, "--data-binary", "@-", body=b'{"messages": [')


@calls
def no_body() -> Any:
    return curl(CHAT, *JSON, "-X", "POST")


@calls
def wrong_method() -> Any:
    return curl(CHAT)


@calls
def unknown_path() -> Any:
    return curl("/v1/nothing")


@calls
def path_with_a_slash_at_its_end() -> Any:
    return curl("/v1/models/")


@calls
def preflight_of_a_browser() -> Any:
    flags = ("-X", "OPTIONS", "-H", "Origin: http://example.org", "-H", "Access-Control-Request-Method: POST")
    return curl(CHAT, *flags)


@calls
def head() -> Any:
    return curl("/health", "-I")["about"]


@calls
def health_ping_and_version() -> Any:
    return [curl(path) for path in ("/health", "/ping", "/version")]


if __name__ == "__main__":
    calls.print_all()
