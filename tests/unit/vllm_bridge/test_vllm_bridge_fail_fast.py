import sys
import threading
import time
from typing import Annotated

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from medialane.vllm_bridge.seams.api_server import failing_fast, is_large


class Point(BaseModel):
    x: int
    y: int = 0


class Line(BaseModel):
    kind: str = "list"


class Drawing(BaseModel):
    """Its members have names that schemas have, too."""

    type: list[Point | Line | str] = []
    default: dict[str, int] = {"a": 1}
    members: set[int] = set()
    metadata: tuple[int, ...] = ()
    serialization: list[list[int]] = Field(default_factory=list)


MANY = {
    "type": [{}, *[[]] * 100],
    "default": {str(i): "no" for i in range(100)},
    "members": ["no", *map(str, "abc")],
    "metadata": ["no"] * 100,
    "serialization": [["no"] * 100] * 100,
}


@pytest.fixture
def adapter():
    with failing_fast():
        return TypeAdapter(Annotated[Drawing, Field()])


def errors_of(adapter, value):
    with pytest.raises(ValidationError) as raised:
        adapter.validate_python(value)
    return raised.value.errors(include_url=False)


@pytest.mark.parametrize("name", MANY)
def test_first_invalid_element_ends_a_collection(adapter, name):
    body = {name: MANY[name]}
    found = errors_of(adapter, body)
    elements = {error["loc"][:2] for error in found}
    assert len(elements) == 1
    assert found == errors_of(TypeAdapter(Drawing), body)[: len(found)]


def test_every_model_field_is_still_validated(adapter):
    assert {error["loc"][0] for error in errors_of(adapter, MANY)} == MANY.keys()


@pytest.mark.parametrize(
    "value", [{}, {"type": [{"x": 1}, {"kind": "dict"}, "x"], "default": {"b": 2}, "members": [1], "metadata": [1, 2]}]
)
def test_accepted_values_are_parsed_identically(adapter, value):
    assert adapter.validate_python(value) == Drawing.model_validate(value)


def test_separately_validated_model_is_left_alone():
    with failing_fast():
        TypeAdapter(Drawing)
    assert len(errors_of(TypeAdapter(Drawing), {"metadata": ["no"] * 100})) == 100


def test_adapter_with_a_configuration_is_left_alone():
    with failing_fast():
        strict = TypeAdapter(list[int], config={"strict": True})
    assert len(errors_of(strict, ["1", "2"])) == 2


def test_names_in_the_callers_scope_are_resolved():
    class Local(BaseModel):
        x: int

    with failing_fast():
        adapter = TypeAdapter("list[Local]")
    assert adapter.validate_python([{"x": 1}]) == [Local(x=1)]


def test_adapters_created_later_list_every_error():
    with failing_fast():
        pass
    assert len(errors_of(TypeAdapter(list[int]), ["no"] * 3)) == 3


@pytest.fixture
def _short_switch_interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_short_switch_interval")
def test_other_threads_run_while_a_list_is_validated(adapter):
    value = {"type": [{"x": 1}] * 200_000}
    done, last, longest = threading.Event(), time.perf_counter(), 0.0

    def validate():
        adapter.validate_python(value)
        done.set()

    thread = threading.Thread(target=validate)
    started = last
    thread.start()
    while not done.is_set():
        now = time.perf_counter()
        last, longest = now, max(longest, now - last)
    took = time.perf_counter() - started
    thread.join()
    assert longest < took / 2


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{}] * 200},
        {"input": "x", "tools": [{"type": "function"}] * 100},
        {"messages": [{"content": [{"type": "text", "text": "x"}] * 100}]},
        {"logit_bias": {str(i): 1 for i in range(200)}},
    ],
)
def test_body_of_many_values_is_large(body):
    assert is_large(body)


@pytest.mark.parametrize("body", [None, b"x" * 1000, [], {}, {"messages": [{"content": "x" * 100_000}] * 10}])
def test_body_of_few_values_is_not_large(body):
    assert not is_large(body)
