"""Files of traffic."""

import json

import pytest


@pytest.fixture
def traffic_file(tmp_path):
    """Write lines of JSON to a file; return its path."""

    def write(*lines, name="traffic.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write
