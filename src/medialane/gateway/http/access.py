"""Who may ask for what, decided by the route that would serve a request, before anything of its body is read.

Theory of operation. Every route is of one of these kinds, by the *matched* route's path: so no spelling of a path (an
encoded newline, a mount's prefix, `root_path`) is of another kind than the handler that would run. A route that is not
listed needs the admin key if there is one, otherwise an API key: what an upgrade or a plugin adds is closed.

    kind      routes                                        accepted keys
    open      OPEN                                          none is needed
    metrics   METRICS_PATH                                  --metrics-key, --admin-key; without the former, none needed
    client    CLIENT, CLIENT_PREFIXES; no route (404, 405)  --api-key, --admin-key; without the former, none needed
    operator  OPERATOR: shows everybody's requests, or      --admin-key; without it none on this machine, if the server
              changes the server                            listens on loopback only, and none suffices elsewhere
    admin     all others                                    --admin-key; without it --api-key

Where clients have keys, requests of each tenant or API key find what they have cached themselves, unless the operator
has one cache for all (`--share-cache`): whether something is cached is in answers, and in how long they take.

With `--keys`, a tenant's key is accepted where one of `--api-key` would be, but for nothing administrative. The limits
of tenants, too, are decided here, for all requests of clients that have a body: of a refused one only the header is
read.

The body of a request that no route serves, or that needs no key although others do, is not read: the app gets none.

Where no key is needed for what is administrative, the browser of whoever may reach the server would be enough: pages of
other sites are refused, and bodies that a form could send.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING

from medialane.gateway.admission import SharedCounts, Tenant, Tenants
from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.metrics import METRICS_PATH
from medialane.gateway.http.responses import JSON, error_form, header, send_error, send_response
from medialane.gateway.intake import WITHOUT_BODY, replay
from medialane.gateway.request.scope import current_scope
from medialane.observability.metrics import Metrics
from medialane.runtime.private_files import read_private
from medialane.types.errors import LimitExceeded, MedialaneError, PermissionDenied, StartupFailed, UnsupportedMediaType
from medialane.wire.security import is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from medialane.gateway.admission.tenants import TenantLimits

#: Returns the path, with its parameters, of the route that would serve a request; None if there is none.
RouteOf = Callable[["Scope"], str | None]

OPEN = frozenset({"/health", "/ready", "/live", "/ping", "/version"})
#: What operators see (`operators.endpoints`), and its page, whose files have no data.
STATE_PATH = "/medialane/state"
REQUESTS_PATH = "/medialane/requests"
REQUEST_PATH = "/medialane/requests/{id}"
PAGE_PATH = "/medialane/"
FILE_PATH = "/medialane/{file}"
RELOAD_PATH = "/medialane/reload"

OPEN_PAGE = frozenset({PAGE_PATH, FILE_PATH})
OPERATOR = frozenset({STATE_PATH, REQUESTS_PATH, REQUEST_PATH, RELOAD_PATH})
#: Media that clients send once, and keep.
MEDIA_PATH = "/medialane/v1/media"
LEASE_PATH = "/medialane/v1/media/{hash}"
FILES_PATH = "/v1/files"
#: Its response is as large as its client likes, and held in the arena until that has read it.
FEATURE_PATH = "/medialane/v1/features/{mm_hash}"
CLIENT_PREFIXES = ("/v1/", "/v2/", "/inference/", "/cohere/")
CLIENT = frozenset({
    "/invocations", "/tokenize", "/detokenize", "/tokenizer_info", "/generative_scoring", "/pooling", "/classify",
    "/score", "/rerank", "/load", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/medialane/publish",
    MEDIA_PATH, LEASE_PATH, FEATURE_PATH,
})  # fmt: skip
#: Administrative although a prefix of clients' routes applies.
ADMIN = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests"})

#: Headers that describe a body.
_BODY_HEADERS = (b"content-length", b"transfer-encoding", b"content-type")
#: Starlette parses it for each route of FastAPI, in a time that grows with the square of its length. None of them uses
#: it.
_COOKIE = b"cookie"
_WEBSOCKET_REFUSED = (
    b'{"error":{"message":"WebSockets (transcription in real time) are not supported: use /v1/audio/transcriptions",'
    b'"type":"NotImplementedError","param":null,"code":501}}'
)
#: Plain vLLM's response.
_UNAUTHORIZED = b'{"error":"Unauthorized"}'
#: Where no key suffices.
_OPERATOR_DENIED = PermissionDenied(
    "this shows all clients' requests, or changes the server: without an admin key (--admin-key-file,"
    " MEDIALANE_ADMIN_KEY) only programs on this machine may ask for it, at a server that listens on 127.0.0.1"
)
_PAGE_DENIED = PermissionDenied(
    "a page of another site (Origin, Sec-Fetch-Site, Host) may not ask for this: it needs the admin key"
    " (--admin-key-file, MEDIALANE_ADMIN_KEY)"
)


class RouteKind(Enum):
    OPEN = auto()
    METRICS = auto()
    CLIENT = auto()
    OPERATOR = auto()
    ADMIN = auto()


#: Where no page of another site may ask without a key.
_GUARDED = frozenset({RouteKind.OPERATOR, RouteKind.ADMIN})
#: Beginnings of headers of a request that came through another server: that one is on this machine, its client need
#: not be.
_PROXY_HEADERS = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"via", b"x-envoy-", b"x-client-ip")


def kind_of(route: str | None) -> RouteKind:
    """Return the kind of a route, given by its path."""
    if route is None or route in CLIENT or (route.startswith(CLIENT_PREFIXES) and route not in ADMIN):
        return RouteKind.CLIENT
    if route in OPEN or route in OPEN_PAGE:
        return RouteKind.OPEN
    if route in OPERATOR:
        return RouteKind.OPERATOR
    return RouteKind.METRICS if route == METRICS_PATH else RouteKind.ADMIN


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass
class AccessKeys:
    """The digests of all keys of each purpose; keys themselves are not kept. `is_local` is whether the server listens
    on loopback only. Only `read_again` changes them."""

    api: Sequence[bytes] = field(default=(), repr=False)
    tenants: Tenants | None = None
    admin: Sequence[bytes] = field(default=(), repr=False)
    metrics: Sequence[bytes] = field(default=(), repr=False)
    is_local: bool = False
    shares_cache: bool = False

    @staticmethod
    def load(
        config: GatewayConfig,
        api_keys: Iterable[str] = (),
        counts: SharedCounts | None = None,
        *,
        is_local: bool = False,
    ) -> AccessKeys:
        """Read the settings and their files. The gateways of a port have `counts` of tenants in common. Raises
        StartupFailed."""
        if config.keys and (api_keys := tuple(api_keys)):
            raise StartupFailed("--keys and API keys (--api-key, MEDIALANE_API_KEYS, VLLM_API_KEY) are both set")
        tenants = Tenants(config.keys, counts) if config.keys else None
        api = [_digest(key.encode()) for key in api_keys]
        keys = AccessKeys(api, tenants, is_local=is_local, shares_cache=config.share_cache)
        use, _ = keys.read_again(config)
        use()
        return keys

    def read_again(self, config: GatewayConfig) -> tuple[Callable[[], None], Sequence[str]]:
        """Read the files of keys; return what uses them, and their flags. Raises StartupFailed."""
        admin, metrics = (list(map(_digest, keys)) for keys in (_admin_keys(config), _metrics_keys(config)))
        if set(admin) & {*self.api, *metrics}:
            raise StartupFailed("the admin key (--admin-key-file) must differ from --api-key and --metrics-key-file")
        tenants: Mapping[bytes, TenantLimits] = {} if self.tenants is None else self.tenants.read()
        if tenants.keys() & {*admin, *metrics}:
            raise StartupFailed("the admin key and the metrics key must differ from the keys of --keys")

        def use() -> None:
            self.admin, self.metrics = admin, metrics
            if self.tenants is not None:
                self.tenants.use(tenants)

        given = {"--keys": config.keys, "--admin-key-file": config.admin_key_file}
        given["--metrics-key-file"] = config.metrics_key_file
        return use, [flag for flag, path in given.items() if path]

    def is_open(self, kind: RouteKind) -> bool:
        """Return whether a route of this kind needs no key."""
        match kind:
            case RouteKind.OPEN:
                return True
            case RouteKind.OPERATOR:
                return False
            case RouteKind.METRICS:
                return not self.metrics
            case RouteKind.CLIENT:
                return not self.api and self.tenants is None
            case RouteKind.ADMIN:
                return not (self.admin or self.api) and self.tenants is None

    def accepts(self, kind: RouteKind, given: bytes) -> bool:
        """Return whether the key with this digest is sufficient for a route of this kind that needs one."""
        match kind:
            case RouteKind.OPEN:
                return True
            case RouteKind.OPERATOR:
                return _is_among(given, self.admin)
            case RouteKind.METRICS:
                return _is_among(given, (*self.metrics, *self.admin))
            case RouteKind.CLIENT:
                return self.tenant(given) is not None or _is_among(given, (*self.api, *self.admin))
            case RouteKind.ADMIN:
                return _is_among(given, self.admin or self.api)

    def admits_operator(self, scope: Scope) -> bool:
        """Return whether a request without an admin key may ask for what operators see."""
        return not self.admin and self.is_local and is_from_this_machine(scope)

    def is_client(self, given: bytes) -> bool:
        """Return whether this is the digest of a client's key."""
        return self.tenant(given) is not None or _is_among(given, self.api)

    def tenant(self, given: bytes) -> Tenant | None:
        return None if self.tenants is None else self.tenants.of(given)


def client_keys(config: GatewayConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the keys of clients, without the tenants of --keys, that a gateway with this environment has."""
    return [key for key in config.api_keys or [environ.get("VLLM_API_KEY", "")] if key]


def admin_key(config: GatewayConfig) -> str:
    """Return a key with which a gateway with these settings accepts administrative calls; empty if it needs none.
    Raises StartupFailed."""
    keys = _admin_keys(config) or [key.encode() for key in config.api_keys]
    return keys[0].decode() if keys else ""


def metrics_key(config: GatewayConfig) -> str:
    """Return a key with which the metrics of a gateway with these settings are read; empty if it needs none. Raises
    StartupFailed."""
    keys = _metrics_keys(config) or _admin_keys(config)
    return keys[0].decode() if keys else ""


def _admin_keys(config: GatewayConfig) -> list[bytes]:
    return _keys("admin-key", config.admin_key, config.admin_key_file)


def _metrics_keys(config: GatewayConfig) -> list[bytes]:
    return _keys("metrics-key", config.metrics_key, config.metrics_key_file)


def _keys(name: str, value: str, file: str) -> list[bytes]:
    """Return the keys of a setting: one per line, of its file if given. Raises StartupFailed."""
    setting, variable = f"--{name}-file", f"MEDIALANE_{name.replace('-', '_').upper()}"
    if value and file:
        raise StartupFailed(f"{variable} and {setting} are both set: use one of them")
    text = read_private(file, setting) if file else value.encode()
    keys = [key for line in text.splitlines() if (key := line.strip())]
    source = f"{setting} {file}" if file else variable
    if (file or value) and not keys:
        raise StartupFailed(f"{source} has no key")
    if not all(key.isascii() and key.decode().isprintable() for key in keys):
        raise StartupFailed(f"{source}: a key must be of printable ASCII characters, to be sent in a header")
    return keys


class AccessMiddleware:
    """Answers 401 without a key, as plain vLLM does, 403 with an API key where that is not sufficient, and 429 to a
    tenant that has reached its limits."""

    def __init__(self, app: ASGIApp, keys: AccessKeys, route_of: RouteOf, metrics: Metrics | None = None) -> None:
        self._app = app
        self._keys = keys
        self._route_of = route_of
        self._metrics = metrics
        if keys.tenants is not None and metrics is not None:
            keys.tenants.on_removed = lambda name: metrics.refused_requests.remove_by_labels({"tenant": name})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await refuse_websocket(send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request, route = current_scope(), self._route_of(scope)
        kind = kind_of(route)
        given = given_key(scope)
        request.record.path = route or ""
        request.has_own_cache = not (self._keys.shares_cache or self._keys.is_open(RouteKind.CLIENT))
        if (refuse := self._refusal(kind, given, scope, route)) is not None:
            request.is_refused = True
            return await refuse(send)
        if kind is RouteKind.CLIENT:
            request.passes_by = False
        scope = _without(scope, _COOKIE)
        if route is None or kind in {RouteKind.OPEN, RouteKind.METRICS}:
            scope, receive = _without(scope, *_BODY_HEADERS), replay(b"", receive)
        elif kind is RouteKind.CLIENT and (tenant := self._keys.tenant(given)) is not None:
            return await self._serve(tenant, scope, receive, send, is_counted=route == FEATURE_PATH)
        return await self._app(scope, receive, send)

    def _refusal(
        self, kind: RouteKind, given: bytes, scope: Scope, route: str | None
    ) -> Callable[[Send], Awaitable[None]] | None:
        """Return what answers a request that may not reach the app; None for one that may."""
        error: MedialaneError | None = None
        if not self._admits(kind, given, scope, route):
            is_hopeless = kind is RouteKind.OPERATOR and not self._keys.admin
            if not (is_hopeless or self._keys.is_client(given)):
                return send_unauthorized
            error = _OPERATOR_DENIED if is_hopeless else _denied(kind)
        elif not self._keys.accepts(kind, given):
            error = _refusal_of_page(scope) if kind in _GUARDED else None
        return None if error is None else partial(send_error, error=error, form=error_form(scope))

    def _admits(self, kind: RouteKind, given: bytes, scope: Scope, route: str | None) -> bool:
        return (
            self._keys.is_open(kind)
            or _is_answered_by_cors(scope, route)
            or self._keys.accepts(kind, given)
            or (kind is RouteKind.OPERATOR and self._keys.admits_operator(scope))
        )

    async def _serve(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send, *, is_counted: bool) -> None:
        """Serve a tenant's request, or refuse it by its limits, which do not count what has no body unless it
        `is_counted`."""
        current_scope().tenant = tenant
        current_scope().record.tenant = tenant.name
        if scope["method"] in WITHOUT_BODY and not is_counted:
            return await self._app(scope, receive, send)
        with ExitStack() as stack:
            try:
                stack.enter_context(tenant.request())
            except LimitExceeded as error:
                return await self._refuse(tenant, error, scope, send)
            return await self._app(scope, receive, send)

    async def _refuse(self, tenant: Tenant, error: LimitExceeded, scope: Scope, send: Send) -> None:
        if self._metrics is not None:
            self._metrics.refused_requests.labels(tenant.name, error.code).inc()
        current_scope().fail(error)
        await send_error(send, error, error_form(scope))


def _without(scope: Scope, *names: bytes) -> Scope:
    return {**scope, "headers": [header for header in scope["headers"] if header[0] not in names]}


def _is_answered_by_cors(scope: Scope, route: str | None) -> bool:
    """Return whether the request reaches no handler: browsers send no keys with a preflight, which vLLM's CORS
    middleware answers; other OPTIONS requests are 404 or 405, unless a mounted app (/metrics) has the path."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return route is None or {b"origin", b"access-control-request-method"} <= names


def is_from_this_machine(scope: Scope) -> bool:
    """Return whether a request to a server on loopback was made by a program on this machine, not by a proxy for
    someone else, nor by another site's page in a browser: those have its name in Host or Origin (DNS rebinding). Host
    alone proves nothing: the client of a proxy chooses it. nginx without settings adds no header, and asks by HTTP/1.0.
    """
    if scope.get("http_version") == "1.0" or any(name.startswith(_PROXY_HEADERS) for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    is_near = client is None or is_loopback(client[0])  # None: on a Unix socket of this user
    return is_near and is_loopback(_host(scope)) and is_same_site(scope)


def is_of_foreign_page(scope: Scope) -> bool:
    """Return whether a page of another site makes the request. One that has its own name in Host and Origin may be such
    a page, which has given its name our address (DNS rebinding); an address is nobody's."""
    if not is_same_site(scope):
        return True
    host = _host(scope)
    return bool(header(scope, b"origin")) and not (host == "localhost" or _is_address(host))


def is_same_site(scope: Scope) -> bool:
    """Return whether no page of another site makes the request."""
    origin = header(scope, b"origin")
    if header(scope, b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
        return False
    return not origin or origin.partition(b"://")[2] == header(scope, b"host")


def _host(scope: Scope) -> str:
    """Return the name or address by which the server was asked."""
    host = header(scope, b"host").decode("latin-1")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refusal_of_page(scope: Scope) -> MedialaneError | None:
    """Return why a request without a key may not ask for what is administrative: a page of another site makes it, or
    could. Browsers ask the server before they send JSON for such a page, not before they send a form."""
    if is_of_foreign_page(scope) and scope["method"] != "OPTIONS":
        return _PAGE_DENIED
    headers = dict(scope["headers"])
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if scope["method"] in WITHOUT_BODY or not has_body or kind == b"application/json":
        return None
    return UnsupportedMediaType("without a key, this needs a body with `Content-Type: application/json`")


def given_key(scope: Scope) -> bytes:
    """Return the digest of the bearer token; of nothing, if there is none: no key is empty."""
    scheme, _, token = header(scope, b"authorization").partition(b" ")
    return _digest(token if scheme.lower() == b"bearer" else b"")


def _is_among(given: bytes, keys: Sequence[bytes]) -> bool:
    """Compare with every key, in a time that does not depend on which one matches."""
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def _denied(kind: RouteKind) -> PermissionDenied:
    needed = "metrics key (or the admin key)" if kind is RouteKind.METRICS else "admin key"
    return PermissionDenied(f"the API key is not sufficient for this path: it needs the {needed} of this server")


async def send_unauthorized(send: Send) -> None:
    """Answer as plain vLLM does to a caller without a key."""
    await send_response(send, 401, _UNAUTHORIZED)


async def refuse_websocket(send: Send) -> None:
    """Answer 501 instead of a handshake, whoever asks: vLLM's only WebSocket is for transcription in real time."""
    length = (b"content-length", str(len(_WEBSOCKET_REFUSED)).encode())
    await send({"type": "websocket.http.response.start", "status": 501, "headers": [JSON, length]})
    await send({"type": "websocket.http.response.body", "body": _WEBSOCKET_REFUSED})
