"""Fetches whose bodies are kept on the heap, where a store has its arena."""

from types import SimpleNamespace
from typing import NamedTuple

from medialane.media.fetch import Fetcher
from medialane.media.http_source import HttpSource
from medialane.media.local_files import LocalFiles


class HeapBody:
    """A body that is appended to `kept` when it is complete."""

    def __init__(self, kept):
        self._kept, self._data = kept, bytearray()

    def expect(self, num_bytes):
        pass

    def write(self, piece):
        self._data += piece

    def finish(self, content_hash):
        self._kept.append(bytes(self._data))

    def abandon(self):
        self._data.clear()


class Fetched(NamedTuple):
    """`data` is None if the hash was known without fetching."""

    content_hash: str
    data: bytes | None


class KeptFetcher(Fetcher):
    def __init__(self, config, **more):
        self.kept = []
        super().__init__(config, open_body=lambda *_: HeapBody(self.kept), **more)

    async def fetch(self, ref, *, need_data=False):
        num_kept = len(self.kept)
        content = await super().fetch(ref, need_data=need_data)
        return Fetched(content, self.kept[-1] if len(self.kept) > num_kept else None)


class KeptSource(HttpSource):
    async def get(self, url, limits, validators=None, *, open_body=None):
        kept = []
        received = await super().get(url, limits, validators, open_body=open_body or (lambda: HeapBody(kept)))
        return SimpleNamespace(
            content_hash=received.content_hash,
            freshness=received.freshness,
            validators=received.validators,
            data=kept[0] if kept else None,
        )


class KeptFiles(LocalFiles):
    async def read(self, url, limits, *, open_body=None):
        kept = []
        content = await super().read(url, limits, open_body=open_body or (lambda: HeapBody(kept)))
        return content, kept[0] if kept else None
