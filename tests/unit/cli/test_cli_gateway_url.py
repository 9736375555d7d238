import pytest

from medialane.cli.status import parse_state
from medialane.cli.workers import base_url, endpoint
from medialane.types.errors import StartupFailed


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


def test_state_of_several_models_is_refused_with_what_to_add():
    page = (
        b'# TYPE medialane_model_up gauge\nmedialane_model_up{model_name="a"} 1\nmedialane_model_up{model_name="b"} 0\n'
    )
    with pytest.raises(StartupFailed, match=r"has several models \(a, b\): add one to its URL: http://h:1\?model=a"):
        parse_state("http://h:1", b"", page)
