"""Descriptions of objects: equal in every process, different for different content."""

import asyncio
import dataclasses
import enum
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import described_objects
import numpy as np
import pytest
import torch

from medialane.vllm_bridge.learned import describe


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_processors_are_described_equally_in_every_process():
    """vLLM's own processors for Pixtral and Step3-VL hold objects that no `to_dict` describes."""
    seed = 1 + int(os.environ.get("PYTHONHASHSEED", "0").replace("random", "0"))
    environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, described_objects.__file__], env=environ, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == described_objects.descriptions()


def test_nothing_of_these_processors_is_unknown():
    assert [unknown for _, unknown in described_objects.descriptions()] == [[], [], []]


class Mode(enum.Enum):
    FAST, SLOW = 1, 2


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Size:
    height: int = 3
    scale: object = 1.0


class Slotted:
    __slots__ = ("side",)

    def __init__(self, side):
        self.side = side


class Cached:
    def __init__(self, side):
        self.side = side

    @functools.cached_property
    def area(self):
        return self.side**2


class One:
    pass


class Two:
    pass


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (1, "1"),
        (1, Number.ONE),
        (None, "null"),
        (float("nan"), float("inf")),
        (1 << 70, 1 << 71),
        ("a", b"a"),
        ("a", Path("a")),
        ([1, 2], [2, 1]),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({1: "a"}, {"1": "a"}),
        ({1, 2}, {1, 3}),
        (Mode.FAST, Mode.SLOW),
        (torch.float16, torch.bfloat16),
        (np.dtype("int8"), np.dtype("int16")),
        (np.float32(0.5), np.float64(0.5)),
        (np.arange(4), np.arange(4).reshape(2, 2)),
        (np.zeros(3), np.ones(3)),
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (np.arange(1000), np.arange(1, 1001)),
        (np.array(1e-6), np.array(1e-5)),  # without a length
        (torch.tensor(1e-6), torch.tensor(1e-5)),
        (torch.zeros(30_000, dtype=torch.int8), torch.ones(30_000, dtype=torch.int8)),
        (Size(3), Size(4)),
        (Size(scale=Size()), Size(scale=Size(4))),
        (One(), Two()),
        (One, Two),
        (Slotted(1), Slotted(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (max, min),
        (torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3, bias=False)),
        (logging.getLogger("a"), logging.getLogger("b")),
    ],
    ids=lambda value: type(value).__name__,  # the processes of a test run must agree on names
)
def test_different_values_are_described_differently(one, two):
    assert describe(one) == describe(one)
    assert describe(one).text != describe(two).text


@pytest.mark.parametrize(
    ("value", "unknown"),
    [
        (Size(scale=threading.Lock()), (".scale (_thread.lock)",)),
        (Size(scale=[1, {"x": threading.Lock()}]), (".scale[1][x] (_thread.lock)",)),
        (Size(scale=list(range(30_000))), (".scale (builtins.list)",)),
    ],
    ids=["lock", "nested", "vocabulary"],
)
def test_what_cannot_be_described_is_named(value, unknown):
    assert describe(value) == describe(value)
    assert describe(value).unknown == unknown


def test_socket_and_running_loop_are_described_by_their_type():
    loop = asyncio.new_event_loop()
    one, two = socket.socketpair()
    try:
        assert "socket" in describe(one).text
        assert describe(Size(scale=one)).text == describe(Size(scale=two)).text
        assert describe(Size(scale=loop)) == describe(Size(scale=loop))
    finally:
        loop.close()
        one.close()
        two.close()


def test_results_that_were_computed_by_use_are_left_out():
    used = Cached(3)
    assert used.area == 9
    assert describe(used) == describe(Cached(3))


def test_tables_of_floats_are_compared_by_shape():
    """Their last bits differ between CPUs."""
    table = np.hanning(400)
    assert describe(table) == describe(np.nextafter(table, 2))
    assert describe(table) != describe(np.hanning(800))


def test_paths_of_the_model_are_relative():
    one = describe({"file": "/one/model/a.json", "other": "/one/models"}, folders=["/one/model"])
    two = describe({"file": "/two/a.json", "other": "/one/models"}, folders=["/two", "/two/a/b"])
    assert one == two
    assert "/one/model/" not in one.text
    assert describe(Path("/one/model"), folders=["/one/model"]) == describe(Path("/two"), folders=["/two"])


def test_object_within_itself_ends():
    value = Size()
    value.scale = [value]
    assert describe(value) == describe(value)
