import pytest

from medialane.cli.workers import base_url, endpoint


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:8000", "http://a:8000/health"),
        ("http://a:8000/", "http://a:8000/health"),
        ("http://a:8000/api/v1/", "http://a:8000/api/health"),
        ("https://a/medialane/?model=org/text", "https://a/health?model=org/text"),
        ("http://a:8000?model=vision", "http://a:8000/health?model=vision"),
    ],
)
def test_path_is_put_before_the_name_of_the_model(given, url):
    assert endpoint(base_url(given), "/health") == url
