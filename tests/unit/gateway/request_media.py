"""The media of a prompt, as a gateway asks for them."""

from medialane.gateway.request.assembly import Assembly
from medialane.gateway.request.media import RequestMedia
from medialane.testing.fake_processor import FakeAssembler


def request_media(prompt, features, scope, **settings) -> RequestMedia:
    """With an assembler of the fake processor."""
    return RequestMedia(prompt, features, scope, Assembly(FakeAssembler()), **settings)
