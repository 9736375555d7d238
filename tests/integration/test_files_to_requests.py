"""Files that clients send to `/v1/files`, and documents in requests: from HTTP into the store, and back as pages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from base64 import b64encode
from contextlib import AsyncExitStack
from datetime import datetime

import pytest
from gateway_parts import Parts, media_endpoints, png
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import (
    AccessKeys,
    AccessMiddleware,
    GatewayConfig,
    ScopeMiddleware,
    current_scope,
)
from medialane.gateway.http import error_form, send_error
from medialane.observability import Metrics
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN
from medialane.testing.sample_media import sample_pdf
from medialane.types.errors import ClientDisconnected, MedialaneError
from medialane.types.feature import MediaPrompt

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}
KEYS = {"search": "key of search", "nightly": "key of nightly"}
PDF = sample_pdf(["first", "second"], width=160, height=100)
FILES, CHAT = "/v1/files", "/v1/chat/completions"


class Server:
    """The gateway's middleware around the endpoint and a chat, with two tenants."""

    def __init__(self, parts, keys_file):
        lines = [json.dumps({"name": n, "sha256": hashlib.sha256(k.encode()).hexdigest()}) for n, k in KEYS.items()]
        keys_file.write_text("\n".join(lines))
        keys_file.chmod(0o600)
        config = GatewayConfig(keys=str(keys_file), **FAST)
        self.gateway = gateway = parts.gateway
        self.intake = Intake(self._route, config, open_document=gateway.open_document)
        self.routes = media_endpoints(parts, config, self.intake.fairness).routes
        self.metrics = Metrics(CollectorRegistry())
        access = AccessMiddleware(self.intake, AccessKeys.load(config), lambda scope: scope["path"])
        self.app = ScopeMiddleware(access, self.metrics)

    def close(self):
        self.intake.close()
        self.metrics.close()

    async def _route(self, scope, receive, send):
        """Stands in for vLLM's app: a chat is answered by what its parts are."""
        try:
            if scope["path"] == CHAT:
                await self._chat(receive, send)
            else:
                name = scope["path"].removeprefix(FILES).strip("/").partition("/")[0]
                route = scope["path"].replace(name, "{file_id}") if name else FILES
                endpoint = self.routes[f"{scope['method']} {route}"]
                await endpoint({**scope, "path_params": {"file_id": name}}, receive, send)
        except ClientDisconnected:
            raise
        except MedialaneError as error:
            current_scope().fail(error)
            await send_error(send, error, error_form(scope))

    async def _chat(self, receive, send):
        body = json.loads((await receive())["body"])
        parts = body["messages"][0]["content"]
        refs = [self.gateway.resolve(part["image_url"]["url"]) for part in parts if "image_url" in part]
        prepared = await self.gateway.prepare(MediaPrompt([1] + [PLACEHOLDER_TOKEN] * len(refs), tuple(refs)))
        sizes = [(placed.feature.size.width, placed.feature.size.height) for placed in prepared.features]
        texts = [part["text"] for part in parts if "text" in part]
        answer = json.dumps({"texts": texts, "sizes": sizes, "cache": current_scope().timeline.cache}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    async def call(
        self, method, path, body=b"", *, tenant="search", query="", content_type="application/json", api=(), reads=True
    ):
        """Return status and body, parsed if it is JSON. `api` are headers of an API's clients."""
        messages, sent = [{"type": "http.request", "body": body, "more_body": False}], []

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)
            if not reads and message["type"] == "http.response.body":
                await asyncio.Event().wait()

        key = b"Bearer " + KEYS[tenant].encode()
        headers = [(b"authorization", key), (b"content-type", content_type.encode()), *api]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        await self.app(scope, receive, send)
        data = b"".join(message.get("body", b"") for message in sent)
        try:
            return sent[0]["status"], json.loads(data)
        except ValueError:
            return sent[0]["status"], data

    async def send(self, data, name="report.pdf", *, fields=None, **options):
        fields = {"purpose": "user_data"} | (fields or {}) if "api" not in options else fields or {}
        form = b"".join(
            f'--xyz\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
            for field, value in fields.items()
        )
        head = f'--xyz\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        body = form + head + data + b"\r\n--xyz--\r\n"
        return await self.call("POST", FILES, body, content_type="multipart/form-data; boundary=xyz", **options)

    async def ask(self, file, **options):
        body = {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}
        return await self.call("POST", CHAT, json.dumps(body).encode(), **options)


@pytest.fixture
async def server(arena, preparers, worker, tmp_path):
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(
            Parts(arena, preparers, [worker], config=GatewayConfig(**FAST, min_body_rate_grace_s=0.5))
        )
        server = Server(parts, tmp_path / "keys")
        stack.callback(server.close)
        yield server
        parts.store.leases.close()


async def test_file_that_nobody_reads_is_released_in_time(server, caplog):
    _, file = await server.send(PDF)
    async with asyncio.timeout(5):
        await server.call("GET", f"{FILES}/{file['id']}/content", reads=False)
    assert server.metrics.registry.get_sample_value("medialane_request_errors_total", {"code": "request_timeout"}) == 1
    assert "has not read" in caplog.text


async def test_file_is_used_listed_read_and_deleted(server):
    status, file = await server.send(PDF, fields={"expires_after[anchor]": "created_at", "expires_after[seconds]": 60})
    assert status == 200, file
    assert abs(file.pop("created_at") - time.time()) < 30
    assert 0 < file.pop("expires_at") - time.time() <= 61
    assert file == {
        "id": file["id"], "object": "file", "bytes": len(PDF), "filename": "report.pdf", "purpose": "user_data",
        "status": "processed",
    }  # fmt: skip
    status, answer = await server.ask({"file_id": file["id"], "dpi": 72})
    assert (status, answer) == (200, {"texts": ["first\n", "second\n"], "sizes": [[160, 100]] * 2, "cache": "miss"})
    assert (await server.ask({"file_id": file["id"], "dpi": 72}))[1]["cache"] == "hit"
    for path, found in ((FILES, lambda each: each["data"][0]), (f"{FILES}/{file['id']}", lambda each: each)):
        status, each = await server.call("GET", path)
        assert (status, found(each)["id"], found(each)["filename"]) == (200, file["id"], "report.pdf")
    assert await server.call("GET", f"{FILES}/{file['id']}/content") == (200, PDF)
    assert await server.call("DELETE", f"{FILES}/{file['id']}") == (
        200, {"id": file["id"], "object": "file", "deleted": True},
    )  # fmt: skip
    assert (await server.call("GET", FILES))[1] == {"object": "list", "data": [], "has_more": False}
    for status, error in (await server.call("GET", f"{FILES}/{file['id']}"), await server.ask({"file_id": file["id"]})):
        assert (status, error["error"]["code"]) == (404, "unknown_media")


async def test_file_of_another_tenant_is_unknown(server):
    _, file = await server.send(PDF)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        status, error = await server.call(method, f"{FILES}/{file['id']}{path}", tenant="nightly")
        assert (status, error["error"]["code"], error["error"]["param"]) == (404, "unknown_media", "file_id")
    assert (await server.call("GET", FILES, tenant="nightly"))[1]["data"] == []
    status, error = await server.ask({"file_id": file["id"]}, tenant="nightly")
    assert (status, error["error"]["param"]) == (404, "messages[0].content[0].file")


async def test_list_is_by_purpose_order_and_pages(server):
    for number in range(3):
        purpose = "vision" if number == 2 else "user_data"
        await server.send(sample_pdf([f"{number}"]), f"{number}.pdf", fields={"purpose": purpose})
    names = [file["filename"] for file in (await server.call("GET", FILES, query="order=asc"))[1]["data"]]
    assert sorted(names) == ["0.pdf", "1.pdf", "2.pdf"]
    _, page = await server.call("GET", FILES, query="purpose=user_data&limit=1")
    _, rest = await server.call("GET", FILES, query=f"purpose=user_data&limit=1&after={page['last_id']}")
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert {page["data"][0]["filename"], rest["data"][0]["filename"]} == {"0.pdf", "1.pdf"}
    status, error = await server.call("GET", FILES, query="limit=0")
    assert (status, error["error"]["param"]) == (400, "limit")


async def test_image_is_a_file_as_well(server):
    _, file = await server.send(png(), "a.png", fields={"purpose": "vision"})
    assert await server.ask({"file_id": file["id"]}) == (200, {"texts": [], "sizes": [[60, 40]], "cache": "miss"})
    assert await server.call("GET", f"{FILES}/{file['id']}/content") == (200, png())


async def test_text_is_a_file_as_well(server):
    text = "\ufeffsome täxt".encode()
    _, file = await server.send(text, "a.txt")
    assert await server.ask({"file_id": file["id"]}) == (200, {"texts": ["some täxt"], "sizes": [], "cache": "none"})
    assert (await server.ask({"file_id": file["id"], "filename": "b.md"}))[1]["texts"] == ["b.md\nsome täxt"]
    assert await server.call("GET", f"{FILES}/{file['id']}/content") == (200, text)
    assert [each["filename"] for each in (await server.call("GET", FILES))[1]["data"]] == ["a.txt"]
    for other in ("image", "pdf"):
        status, error = await server.ask({"file_id": file["id"].replace("text", other)})
        assert (status, error["error"]["param"]) == (400, "messages[0].content[0].file")
    assert (await server.ask({"file_id": file["id"]}, tenant="nightly"))[0] == 404


async def test_clients_of_anthropics_api_get_its_objects(server):
    api = [(b"anthropic-version", b"2023-06-01")]
    status, file = await server.send(PDF, fields={"expires_in_seconds": 60}, api=api)
    assert status == 200, file
    created_at, expires_at = (datetime.fromisoformat(file.pop(name)) for name in ("created_at", "expires_at"))
    assert 0 < (expires_at - created_at).total_seconds() <= 61
    assert file == {
        "id": file["id"], "type": "file", "filename": "report.pdf", "mime_type": "application/pdf",
        "size_bytes": len(PDF), "downloadable": True,
    }  # fmt: skip
    _, other = await server.send(png(), "a.png", api=api)
    _, page = await server.call("GET", FILES, query="limit=1&beta=true", api=api)
    assert page["has_more"]
    _, rest = await server.call("GET", FILES, query=f"page={page['next_page']}", api=api)
    assert (rest["has_more"], rest["next_page"]) == (False, None)
    assert {each["data"][0]["id"] for each in (page, rest)} == {file["id"], other["id"]}
    path = f"{FILES}/{file['id']}"
    assert (await server.call("GET", path, api=api))[1]["mime_type"] == "application/pdf"
    assert await server.call("DELETE", path, api=api) == (200, {"id": file["id"], "type": "file_deleted"})
    status, error = await server.call("GET", path, api=api)
    assert (status, error["type"], error["error"]["type"]) == (404, "error", "invalid_request_error")


async def test_refused_files_name_the_field(server):
    for data, fields, status, param in (
        (PDF, {"purpose": "fine-tune"}, 400, "purpose"),
        (PDF, {"purpose": ""}, 400, "purpose"),
        (PDF, {"colour": "red"}, 400, "colour"),
        (PDF, {"expires_after[seconds]": "soon"}, 400, "expires_after"),
        (b"", {}, 400, "file"),
        (b"t\xe4xt", {}, 415, "file"),
        (b"\xef\xbb\xbf", {}, 400, "file"),
        (b"a" * 1_100_000, {}, 413, "file"),
        (b"PK\3\4 a spreadsheet", {}, 415, "file"),
        (PDF[:60], {}, 400, None),
    ):
        found, error = await server.send(data, fields=fields)
        assert (found, error["error"]["param"]) == (status, param), error
    assert (await server.call("POST", FILES, b"{}"))[0] == 400
    assert (await server.call("GET", FILES))[1]["data"] == []


async def test_document_in_a_request_is_sent_to_the_store_once(server):
    file = {"filename": "report.pdf", "file_data": b64encode(PDF).decode(), "dpi": 72, "pages": "2"}
    assert await server.ask(file) == (200, {"texts": ["report.pdf\nsecond\n"], "sizes": [[160, 100]], "cache": "miss"})
    assert (await server.ask({**file, "pages": "1,2", "text": "none"}))[1] == {
        "texts": ["report.pdf\n"], "sizes": [[160, 100]] * 2, "cache": "mixed",
    }  # fmt: skip
    for options, code in (
        ({"pages": "3"}, "invalid_request"),
        ({"max_pages": 1, "pages": ""}, "too_many_pages"),
        ({"file_data": b64encode(PDF[:60]).decode()}, "invalid_document"),
    ):
        status, error = await server.ask({**file, **options})
        assert (status, error["error"]["code"], error["error"]["param"]) == (400, code, "messages[0].content[0].file")
