"""Extracts media from a JSON body: replaces them by references and decodes base64 directly from the body's bytes.

Theory of operation. Four steps; none reads a media payload byte by byte in Python:

1. *Cut* (`skeleton`). The bytes from `;base64,` to the next quote can be removed from a JSON string without changing
   where strings begin and end, unless they contain a backslash. So payloads are found by searching for bytes (at memory
   speed), and the rest, the *skeleton*, is small. A payload written with escapes is not cut: slower, equally correct.
2. *Count* (`limits`). One compiled pass over the skeleton counts nesting levels and values before it is parsed, here
   or in the application. If it contains what Python's parser accepts but JSON does not (NaN, lone surrogates), the
   skeleton is converted to strict JSON without moving a byte; the body itself is not changed.
3. *Parse* (`search`). The skeleton is parsed once, typed for the places where media can be; any other content of such a
   place is skipped, since the application behind us validates it. Values are views of the skeleton, so each has a
   position, and the position identifies the payload that was cut from it: no marker is needed that a client could
   forge.
4. *Extract* (`places`, `documents`). Each place becomes a `MediaRef`, and its string in the body a reference, by slices
   of the original body: every other byte is forwarded unchanged, payloads cut from other strings included. Once the
   store has opened the documents, `with_pages` puts their pages in their places.

medialane's extensions are read in the same pass: the options of an item next to its URL, and the body's member
`medialane`, which is removed.

A body in another encoding is converted to UTF-8 first. Uploads of speech are in a form instead of JSON. A body that is
not JSON, or does not have the expected structure, is forwarded unchanged, and the application responds to it. The
application cannot fetch a URL that was not extracted: it resolves references only.

Before all that, a body is read within its limits (`bodies`).
"""

from medialane.gateway.intake.bodies import (
    WITHOUT_BODY,
    BodyBuffer,
    BodyMemory,
    BoundedReceive,
    BudgetCharge,
    replay,
)
from medialane.gateway.intake.extraction import (
    ExtractedMedia,
    check_salt,
    data_bytes,
    extract,
    extract_files,
    form_fields,
    is_multipart,
    with_pages,
)
from medialane.gateway.intake.limits import warm_up
from medialane.gateway.intake.sent_features import placeholder_field
from medialane.gateway.intake.skeleton import Buffer

__all__ = [
    "WITHOUT_BODY",
    "BodyBuffer",
    "BodyMemory",
    "BoundedReceive",
    "BudgetCharge",
    "Buffer",
    "ExtractedMedia",
    "check_salt",
    "data_bytes",
    "extract",
    "extract_files",
    "form_fields",
    "is_multipart",
    "placeholder_field",
    "replay",
    "warm_up",
    "with_pages",
]
