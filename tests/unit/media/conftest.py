import pytest

from http_origin import HttpOrigin


@pytest.fixture
async def origin():
    async with HttpOrigin() as origin:
        yield origin
