"""Media out of a JSON body: references in their place, base64 decoded straight from the body's bytes.

Theory of operation. Four steps, none of which looks at a media payload byte by byte in Python:

1. *Cut* (`skeleton`). What follows `;base64,` up to the next quote can be taken out of a JSON string without changing
   where strings begin and end, unless there is a backslash in it. So payloads are found by searching for bytes (memory
   speed), and what is left, the *skeleton*, is small. A payload that is written with escapes stays in: slower, and just
   as right.
2. *Count* (`json_scan`). One compiled pass over the skeleton counts levels and values before anything parses it, here
   or in the application. Where there is what Python's parser takes and JSON does not have (NaN, lone surrogates), the
   skeleton is made strict JSON with every byte in its place; the body itself stays as it came.
3. *Parse* (`request_body`, `places`). The skeleton is parsed once, typed for the places where media stand; whatever
   else a place holds is skipped, since judging it is for the application behind us. Values come as views of the
   skeleton, so each tells its position, and a position tells which payload was cut from inside it: nothing that a
   client writes can pose as our mark.
4. *Lift* (`url_place`, `base64_place`, `embeds_place`, `uuid_place`, `edits`). Each place becomes a `MediaRef`, and the
   string in the body `medialane:<n>`, by slices of the original body: every other byte is passed on as it came,
   payloads cut from other strings included.

What a client says of our own is read on the way: the options of an item beside its URL, and what is asked for under
the body's `medialane`, which is taken out (`medialane_member`).

A body in another encoding is made UTF-8 first (`text_encoding`). One that is not JSON, or not of the expected form, is
passed on untouched, and the application answers as it does. A URL that was not lifted from its place is nothing that
the application could fetch: it resolves references only.
"""

from medialane.gateway.intake.extraction import Intake, extract

__all__ = ["Intake", "extract"]
