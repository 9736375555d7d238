"""Files in a request: each form of each API, and the body that vLLM's app gets instead."""

import asyncio
import json
from base64 import b64encode

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import GatewayConfig, ScopeMiddleware, current_scope
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.types.errors import InvalidDocument
from medialane.types.hashing import content_hash
from medialane.types.media import PDF_TYPE, DocumentOptions, DocumentPage, OpenedDocument, PageIo

JSON = [(b"content-type", b"application/json")]
PDF = b"%PDF-1.7\n" + bytes(range(256)) * 8
PNG = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x08\0\0\0\x08\x08\2\0\0\0").decode()
B64 = b64encode(PDF).decode()
DATA_URL = f"data:application/pdf;base64,{B64}"
LEASE = "ab" * 32
URL = f"medialane:media/{LEASE}"
TEXT = 'a "quoted"\n\\ ;base64,' + "A" * 2000
TWO = ["one\n", "two\n"]


def encoded(text: str | bytes) -> str:
    return b64encode(text if isinstance(text, bytes) else text.encode()).decode()


class Store:
    """Opens documents of as many pages as there are texts, by their filename's place in the request."""

    def __init__(self, *texts, error=None):
        self.texts, self.error = list(texts or [TWO]), error
        self.asked = []

    async def open(self, ref, options):
        number = len(self.asked)
        self.asked.append((ref, options))
        for _ in range(20 - 5 * number):  # the last one is ready first
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error.at(ref.param)
        texts = self.texts[number]
        pages = [DocumentPage(PageIo("d", 200, n, "r", 100), text) for n, text in enumerate(texts, 1)]
        content = content_hash(ref.data) if ref.data is not None else "c" * 64
        return OpenedDocument(content, len(texts), tuple(pages))


class Asked:
    """One request through both middlewares: `body` is what the app got, with `<n>` for reference n."""

    def __init__(self, document, store=None, *, path="/v1/chat/completions", config=None, leaves=False, **limits):
        self.store, self.body, self.refs, self.sent = store, None, (), []
        self._leaves = leaves
        self._document, self._path = document, path
        self._intake = Intake(
            self._app, config, MediaConfig(**limits), open_document=None if store is None else store.open
        )

    async def __call__(self):
        body = self._document if isinstance(self._document, bytes) else json.dumps(self._document).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            return {"type": "http.disconnect"} if self._leaves else await asyncio.Event().wait()

        async def send(message):
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": self._path, "headers": JSON}
        try:
            await ScopeMiddleware(self._intake, Metrics(CollectorRegistry()))(scope, receive, send)
        finally:
            self._intake.close()
        return self

    async def _app(self, scope, receive, send):
        request = current_scope()
        body = (await receive())["body"].decode()
        assert dict(scope["headers"])[b"content-length"] == str(len(body.encode())).encode()
        self.refs = request.extracted.refs
        self.memory = request.extracted.num_bytes
        self.record = request.record
        self.body = json.loads(body.replace(request.references.prefix, "<").replace("<", "ref "))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    @property
    def error(self):
        error = json.loads(self.sent[1]["body"])["error"]
        return self.sent[0]["status"], error.get("code"), error.get("param"), error["message"]


async def asked(parts, store=None, **options):
    """The parts that the app gets instead of these, of a message of the API to which the path belongs."""
    member = "input" if options.get("path") == "/v1/responses" else "messages"
    request = await Asked({member: [{"role": "user", "content": parts}]}, store or Store(), **options)()
    assert request.body is not None, request.error
    return request.body[member][0]["content"], request


def text(words):
    return {"type": "text", "text": words}


def image(number):
    return {"type": "image_url", "image_url": {"url": f"ref {number}"}}


def input_text(words):
    return {"type": "input_text", "text": words}


def input_image(number):
    return {"type": "input_image", "detail": "auto", "image_url": f"ref {number}"}


def block(number):
    return {"type": "image", "source": {"type": "url", "url": f"ref {number}"}}


def chat_file(**members):
    return {"type": "file", "file": members}


def document(source, **members):
    return {"type": "document", "source": source, **members}


PAGES = [text("one\n"), image(0), text("two\n"), image(1)]
NAMED = [text("a.pdf\none\n"), *PAGES[1:]]
INPUTS = [input_text("one\n"), input_image(0), input_text("two\n"), input_image(1)]
BLOCKS = [text("one\n"), block(0), text("two\n"), block(1)]

#: The part, the path of its API, what the app gets, and URL or data of the document.
FORMS = {
    "chat: a data: URL": (chat_file(filename="a.pdf", file_data=DATA_URL), "", NAMED, PDF),
    "chat: bare base64": (chat_file(file_data=B64), "", PAGES, PDF),
    "chat: of a wrong type": (chat_file(file_data=f"data:image/png;base64,{B64}"), "", PAGES, PDF),
    "chat: a file that was sent before": (chat_file(file_id=f"file-pdf-{LEASE}"), "", PAGES, URL),
    "chat: as an image": ({"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}, "", PAGES, PDF),
    "chat: as an image, a string": ({"type": "image_url", "image_url": DATA_URL}, "", PAGES, PDF),
    "responses: a data: URL": (
        {"type": "input_file", "filename": "a.pdf", "file_data": DATA_URL}, "/v1/responses",
        [input_text("a.pdf\none\n"), *INPUTS[1:]], PDF,
    ),
    "responses: a URL": (
        {"type": "input_file", "file_url": "https://a.example/b"}, "/v1/responses", INPUTS, "https://a.example/b",
    ),
    "responses: a file that was sent before": (
        {"type": "input_file", "file_id": f"file-pdf-{LEASE}", "detail": "low"}, "/v1/responses", INPUTS,
        URL,
    ),
    "responses: as an image": ({"type": "input_image", "image_url": DATA_URL}, "/v1/responses", INPUTS, PDF),
    "messages: base64": (
        document({"type": "base64", "media_type": PDF_TYPE, "data": B64}, cache_control={"type": "ephemeral"}),
        "/v1/messages", BLOCKS, PDF,
    ),
    "messages: a title and a context": (
        document({"type": "base64", "data": B64}, title="Invoice", context="of May", citations={"enabled": False}),
        "/v1/messages", [text("Invoice\nof May\none\n"), *BLOCKS[1:]], PDF,
    ),
    "messages: a URL": (
        document({"type": "url", "url": "https://a.example/b.pdf"}), "/v1/messages", BLOCKS, "https://a.example/b.pdf",
    ),
    "messages: a file that was sent before": (
        document({"type": "file", "file_id": f"file-pdf-{LEASE}"}), "/v1/messages", BLOCKS, URL,
    ),
    "messages: as an image": (
        {"type": "image", "source": {"type": "base64", "media_type": PDF_TYPE, "data": B64}}, "/v1/messages", BLOCKS,
        PDF,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_a_document_becomes_its_pages_in_the_form_of_the_api(form):
    part, path, expected, given = FORMS[form]
    found, request = await asked([part, text("What is it?")], path=path or "/v1/chat/completions")
    assert found == [*expected, text("What is it?")]
    ((ref, options),) = request.store.asked
    assert (ref.modality, ref.media_type, ref.url or ref.data) == ("image", PDF_TYPE, given)
    assert options == DocumentOptions()
    assert [each.param for each in request.refs] == [f"{ref.param}#page=1", f"{ref.param}#page=2"]
    assert [each.page for each in request.refs] == [PageIo("d", 200, number, "r", 100) for number in (1, 2)]
    assert all((each.url or each.data, each.media_type) == (given, PDF_TYPE) for each in request.refs)
    assert all(each.content for each in request.refs)
    assert "open;dur=" in dict(request.sent[0]["headers"])[b"server-timing"].decode()


async def test_large_numbers_reach_the_store_as_what_it_can_read():
    _, request = await asked([chat_file(file_data=B64, max_pixels=10**30)])
    assert request.store.asked[0][1].max_pixels == 1 << 31


async def test_strings_may_be_written_with_escapes():
    body = json.dumps({"messages": [{"role": "user", "content": [chat_file(filename="é.pdf", file_data=DATA_URL)]}]})
    request = await Asked(body.replace("/", "\\/").encode(), Store())()
    assert request.body["messages"][0]["content"] == [text("é.pdf\none\n"), *PAGES[1:]]
    assert request.store.asked[0][0].data == PDF


async def test_pages_have_the_bytes_of_their_document_in_common():
    _, request = await asked([chat_file(file_data=DATA_URL)], Store(["text"] * 10))
    assert len(request.refs) == 10
    assert request.memory == len(PDF)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pages": "1-3,7"}, DocumentOptions(pages="1-3,7")),
        ({"dpi": 150, "max_pixels": 10**6, "max_pages": 5}, DocumentOptions(dpi=150, max_pixels=10**6, max_pages=5)),
        ({"text": "none"}, DocumentOptions(text=False)),
        ({"text": "before"}, DocumentOptions()),
        ({"dpi": 1200, "max_pixels": 1.0}, DocumentOptions(dpi=1200, max_pixels=1)),
        (dict.fromkeys(("pages", "dpi", "max_pixels", "max_pages", "text")), DocumentOptions()),  # null is not set
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_options_beside_the_data(api, options, expected):
    part, path = {
        "chat": (chat_file(file_data=B64, **options), "/v1/chat/completions"),
        "responses": ({"type": "input_file", "file_data": B64, **options}, "/v1/responses"),
        "messages": (document({"type": "base64", "data": B64, **options}), "/v1/messages"),
    }[api]
    _, request = await asked([part], path=path)
    assert request.store.asked[0][1] == expected


async def test_an_image_part_with_a_document_has_its_option():
    _, request = await asked([{"type": "image_url", "image_url": {"url": DATA_URL, "max_pixels": 200_000}}])
    assert request.store.asked[0][1] == DocumentOptions(max_pixels=200_000)


async def test_documents_images_and_pages_without_text_keep_their_order():
    parts = [
        {"type": "image_url", "image_url": {"url": "https://a.example/0.png"}},
        chat_file(filename="a.pdf", file_data=DATA_URL),
        text("between"),
        {"type": "image_url", "image_url": {"url": "https://a.example/1.png"}},
        chat_file(filename="b.pdf", file_data=B64),
        {"type": "video_url", "video_url": {"url": "https://a.example/2.mp4"}},
    ]
    found, request = await asked(parts, Store(["", "a2"], ["b1", "", "b3"]))
    expected = [
        image(0), text("a.pdf\n"), image(1), text("a2\n"), image(2), text("between"), image(3),
        text("b.pdf\nb1\n"), image(4), image(5), text("b3\n"), image(6),
        {"type": "video_url", "video_url": {"url": "ref 7"}},
    ]  # fmt: skip
    assert found == expected
    field = "messages[0].content"
    assert [ref.param for ref in request.refs] == [
        f"{field}[0].image_url", f"{field}[1].file#page=1", f"{field}[1].file#page=2", f"{field}[3].image_url",
        *(f"{field}[4].file#page={n}" for n in (1, 2, 3)), f"{field}[5].video_url",
    ]  # fmt: skip
    assert [ref.modality for ref in request.refs] == ["image"] * 7 + ["video"]


async def test_documents_in_results_of_tools():
    results = [
        {"type": "text", "text": "found"},
        document({"type": "base64", "data": B64}),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ]
    part = {"type": "tool_result", "tool_use_id": "t", "content": results}
    (found,), _ = await asked([part], path="/v1/messages")
    expected = {"type": "base64", "media_type": "image/png", "data": "ref 2"}
    assert found == {**part, "content": [text("found"), *BLOCKS, {"type": "image", "source": expected}]}
    output = [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_data": B64}]}]
    request = await Asked({"input": output}, Store(), path="/v1/responses")()
    assert request.body["input"][0]["output"] == INPUTS


async def test_blocks_of_a_document_stay_with_their_images():
    blocks = [text("a"), {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}]
    source = {"type": "content", "content": blocks}
    found, request = await asked(
        [document(source, title="T"), document({"type": "base64", "data": B64})], path="/v1/messages"
    )
    own = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "ref 0"}}
    assert found == [text("T\n"), text("a"), own, text("one\n"), block(1), text("two\n"), block(2)]
    assert request.refs[0].param == "messages[0].content[0].source.content[1].source"
    (found, _) = await asked([document({"type": "content", "content": "as it is"})], path="/v1/messages")
    assert found == [text("as it is")]


#: A file that is no document, and the parts that the app gets.
OTHER_FILES = {
    "a text": (chat_file(filename="a.txt", file_data=encoded("hällo\n")), [text("a.txt\nhällo\n")]),
    "a table with a byte order mark": (chat_file(file_data=encoded(b"\xef\xbb\xbfa;b")), [text("a;b")]),
    "JSON": (chat_file(file_data=f"data:application/json;base64,{encoded('[1]')}"), [text("[1]")]),
    "an image": (chat_file(filename="a.pdf", file_data=f"data:application/pdf;base64,{PNG}"), [image(0)]),
    "an image that was sent before": (chat_file(file_id=f"file-image-{LEASE}"), [image(0)]),
    "a text of the responses API": (
        {"type": "input_file", "filename": "a.py", "file_data": encoded("x = 1")},
        [input_text("a.py\nx = 1")],
    ),
    "an image at a URL": (
        {"type": "input_file", "file_url": "https://a.example/a.JPG?b=c"},
        [input_image(0)],
    ),
    "an Anthropic image that was sent before": (
        {"type": "image", "source": {"type": "file", "file_id": f"file-image-{LEASE}"}},
        [block(0)],
    ),
    "an Anthropic text": (
        document({"type": "text", "media_type": "text/plain", "data": TEXT}, title="T"),
        [text("T\n"), text(TEXT)],
    ),
}


@pytest.mark.parametrize("file", OTHER_FILES)
async def test_files_that_are_no_documents(file):
    part, expected = OTHER_FILES[file]
    paths = {"file": "/v1/chat/completions", "input_file": "/v1/responses"}
    found, request = await asked([part, text("?")], path=paths.get(part["type"], "/v1/messages"))
    assert found == [*expected, text("?")]
    assert request.store.asked == []
    assert [ref.media_type for ref in request.refs] in ([], [None], ["image/png"])


FILE = "messages[0].content[0].file"
#: Part, status, code, field, and words of the message.
REFUSED = {
    "an unknown key": (chat_file(file_data=B64, page="1"), 400, "invalid_request", f"{FILE}.page", "mean pages"),
    **{
        f"{name} as {value!r}": (
            chat_file(file_data=B64, **{name: value}), 400, "invalid_request", f"{FILE}.{name}", words,
        )
        for name, words, values in (
            ("pages", "1-3,7", (3, 1.5, True, ["1"], {"first": 1})),
            ("text", '"before"', ("after", "", True, 1, [])),
            ("dpi", "at least 1", (0, -1, 0.5, -(10**30))),
            ("dpi", "at most 1200", (1201, 10**30, 1e300)),
            ("dpi", "a number", ("a", "100", True, [100], {})),
            ("max_pixels", "at least 1", (0, -1)),
            ("max_pages", "a number", ("2", False)),
        )
        for value in values
    },
    "no data": (chat_file(filename="a.pdf"), 400, "empty_media", FILE, "file_data or file_id"),
    "no base64": (chat_file(file_data="data:application/pdf;base64,a b"), 400, "invalid_base64", FILE, "base64"),
    "an unknown file": (chat_file(file_id="file-abc"), 404, "unknown_media", FILE, "no file 'file-abc'"),
    "DOCX": (chat_file(file_data=encoded(b"PK\3\4" + bytes(99))), 415, "unsupported_media_type", FILE, "to PDF"),
    "DOC": (chat_file(file_data=encoded(b"\xd0\xcf\x11\xe0" + b"a")), 415, "unsupported_media_type", FILE, "to PDF"),
    "text in Latin-1": (chat_file(file_data=encoded(b"h\xe4llo")), 415, "unsupported_media_type", FILE, "UTF-8"),
    "other bytes": (chat_file(file_data=encoded(bytes(99))), 415, "unsupported_media_type", FILE, "no PDF"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_files_name_their_field(case):
    part, *expected, words = REFUSED[case]
    request = await Asked({"messages": [{"role": "user", "content": [part]}]}, Store())()
    assert list(request.error[:3]) == expected
    assert words in request.error[3]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (document({"type": "base64", "data": B64}, citations={"enabled": True}), "citations are not supported"),
        (document({"type": "base64", "data": B64, "dpis": 3}), "did you mean dpi"),
        (document({"type": "content", "content": [ ]}), "the document is empty"),
        (document({"type": "text"}), "a document's source is of type"),
        (document({"type": "base64", "data": B64}, citations=3), "this cannot be read"),
        (document({"type": "base64", "data": B64}, titel="a"), "did you mean title"),
    ],
)  # fmt: skip
async def test_refused_documents_of_messages(part, words):
    request = await Asked({"messages": [{"role": "user", "content": [part]}]}, Store(), path="/v1/messages")()
    assert request.error[0] == 400
    assert words in request.error[3]


async def test_the_error_of_a_document_is_the_answer():
    store = Store(error=InvalidDocument("the document is encrypted"))
    request = await Asked({"messages": [{"role": "user", "content": [chat_file(file_data=B64)]}]}, store)()
    assert request.error == (400, "invalid_document", FILE, "the document is encrypted")
    request = await Asked({"messages": [{"role": "user", "content": [chat_file(file_data=B64)]}]})()
    assert request.error[:3] == (400, "invalid_request", FILE)


async def test_client_that_leaves_while_its_document_is_opened_ends_the_request():
    class Waiting(Store):
        async def open(self, ref, options):
            async with current_scope().connected():
                await asyncio.Event().wait()

    body = {"messages": [{"role": "user", "content": [chat_file(file_data=B64), chat_file(file_data=B64)]}]}
    request = await Asked(body, Waiting(), leaves=True)()
    assert (request.body, request.sent) == (None, [])


async def test_pages_of_all_documents_of_a_prompt_are_counted():
    image = {"type": "image_url", "image_url": {"url": "https://a.example/0.png"}}
    parts = [image, chat_file(file_data=B64), chat_file(file_data=B64)]
    body = {"messages": [{"role": "user", "content": parts}]}
    request = await Asked(body, Store(["a"] * 3, ["b"] * 2), max_document_pages=4)()
    assert request.error[:3] == (400, "too_many_media_items", "messages[0].content[2].file")
    assert "5 pages, more than 4" in request.error[3]
    assert (await Asked(body, Store(["a"] * 3, ["b"] * 2), max_items=3, max_document_pages=5)()).body is not None
    batch = {"messages": [body["messages"], body["messages"]]}
    opened = [["a"] * 3, ["b"] * 2] * 2
    assert (await Asked(batch, Store(*opened), max_document_pages=5)()).body is not None
    request = await Asked(batch, Store(*opened), max_document_pages=5, max_batch_items=11)()
    assert request.error[:2] == (400, "too_many_media_items")
    assert "12 media items, more than 11" in request.error[3]


async def test_texts_of_pages_count_as_text_of_the_body():
    body = {"messages": [{"role": "user", "content": [chat_file(file_data=B64)]}]}
    limits = GatewayConfig(max_text_bytes=5000)
    assert (await Asked(body, Store(["a" * 4000]), config=limits)()).body is not None
    request = await Asked(body, Store(["a" * 3000, "b" * 3000]), config=limits)()
    assert request.error[:3] == (413, "body_too_large", FILE)
    large = {"messages": [{"role": "user", "content": [chat_file(file_data=encoded("a" * 6000))]}]}
    assert (await Asked(large, Store(), config=limits)()).error[:2] == (413, "body_too_large")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "file": {"file_data": B64}},
        {"type": "file", "file": "a"},
        {"type": "text", "text": "a", "file_id": "b"},
        {"type": "document", "document": {"data": "a"}},
    ],
)
async def test_other_parts_are_left_to_the_app(part):
    found, request = await asked([part])
    assert found == [part]
    assert request.refs == ()


async def test_what_only_calls_itself_a_document_is_what_it_is():
    parts = [{"type": "video_url", "video_url": {"url": DATA_URL}}]
    _, request = await asked(parts)
    assert [(ref.modality, ref.media_type) for ref in request.refs] == [("video", None)]
    for media_type in ("text/plain", PDF_TYPE):
        image_url = {"url": f"data:{media_type};base64,{PNG}", "detail": "low"}
        (found,), request = await asked([{"type": "image_url", "image_url": image_url}])
        assert (found["image_url"]["url"], request.store.asked) == ("ref 0", [])
        assert [(ref.modality, ref.source, ref.media_type) for ref in request.refs] == [("image", "image", None)]
    source = {"type": "base64", "media_type": PDF_TYPE, "data": PNG}
    (found,), request = await asked([{"type": "image", "source": source}], path="/v1/messages")
    assert (found["source"]["data"], request.refs[0].source) == ("ref 0", "image")
    request = await Asked({"images": [DATA_URL]}, Store(), path="/v2/embed")()
    assert [(ref.modality, ref.media_type) for ref in request.refs] == [("image", None)]
