"""Settings of a Hugging Face processor: which are compared, and what is logged of the others."""

import itertools
import threading
from types import SimpleNamespace

import pytest

from medialane.vllm_bridge.learned.settings import compared_settings


class ImageProcessor:
    def __init__(self, **values):
        self.__dict__ |= {"size": {"height": 64}, "mean": [0.5, 0.5], **values}


class FakeProcessor:
    def __init__(self, **values):
        self.image_processor = ImageProcessor(**values)
        self.tokenizer = object()
        self.patch_size = 14


def test_settings_are_named_by_component_and_attribute():
    found = compared_settings(FakeProcessor)
    assert found == {
        "hf_processor": '{"class":"FakeProcessor"}',
        "hf_processor.patch_size": "14",
        "hf_processor.image_processor": '{"class":"ImageProcessor"}',
        "hf_processor.image_processor.size": '{"dict":[["height",64]]}',
        "hf_processor.image_processor.mean": "[0.5,0.5]",
    }


def test_processors_that_differ_in_a_setting_differ_there_alone():
    one, other = compared_settings(FakeProcessor), compared_settings(lambda: FakeProcessor(size={"height": 32}))
    assert {name for name in one if one[name] != other[name]} == {"hf_processor.image_processor.size"}


def test_settings_that_cannot_be_compared_are_logged_in_one_line(caplog):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    found = compared_settings(
        lambda: FakeProcessor(lock=threading.Lock(), guard=SimpleNamespace(lock=threading.Lock()))
    )
    (record,) = caplog.records
    for name in ("hf_processor.image_processor.lock", "hf_processor.image_processor.guard.lock (_thread.lock)"):
        assert name in record.getMessage()
    assert found["hf_processor.image_processor.lock"] == '{"unknown":"lock"}'


def test_setting_that_differs_in_each_processor_is_left_out(caplog):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all
    number = itertools.count()
    found = compared_settings(lambda: FakeProcessor(session=next(number)))
    assert found == compared_settings(FakeProcessor)
    (record,) = caplog.records
    assert record.getMessage().endswith("they differ: hf_processor.image_processor.session")


@pytest.mark.parametrize("error", [OSError("no preprocessor_config.json"), TypeError("not a processor")])
def test_model_without_a_processor_has_no_such_settings(caplog, error):
    caplog.set_level("WARNING", "medialane")  # a library of vLLM's app raises the level of all

    def fail():
        raise error

    assert compared_settings(fail) == {}
    assert str(error) in caplog.text
