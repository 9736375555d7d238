"""Processors whose descriptions `test_vllm_bridge_stable_description` compares between processes: run as a program, it
prints them."""

import functools
import json
import logging
import sys

import torch
from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder, SpecialImageIDs
from vllm.transformers_utils.processors.pixtral import MistralCommonImageProcessor
from vllm.transformers_utils.processors.step3_vl import Step3VLImageProcessor

from medialane.vllm_bridge.learned import describe


class Processor:
    """Has everything whose `repr` differs between processes."""

    def __init__(self):
        names = {f"name{n}" for n in range(50)}
        self.names, self.listed, self.by_name = names, list(names), dict.fromkeys(names, 1)
        self.pairs = {(1, "a"), (2, "b"), (3, "c")}
        self.reason = f"made by {object()!r}"
        self.pick, self.call = lambda value: value * self.scale, functools.partial(max, 3)
        self.scale, self.method = torch.tensor([0.5]), self.resize
        self.logger, self.module, self.itself = logging.getLogger("x"), json, self

    def resize(self):
        """An attribute of it refers to this method."""


def descriptions():
    """Return the descriptions as JSON does."""
    encoder = ImageEncoder(ImageConfig(16, 1024, 2), SpecialImageIDs(1, 2, 3))
    made = (MistralCommonImageProcessor(encoder), Step3VLImageProcessor(), Processor())
    return [[text, list(unknown)] for text, unknown in map(describe, made)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(descriptions()))
