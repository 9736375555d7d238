"""From encoded media to features: decode and run the engine's processor in N sandboxed processes, results in the arena.

`PreparerPool` is the store's side. The engine supplies the protocols `Processor` and `Assembler`, and a factory that
builds the former inside the fork server. A warm process calls `prebuild_processor`, and its forks `fork_forkserver`.
"""

from medialane.prepare.config import PrepareConfig
from medialane.prepare.forkserver_process import ProcessorSource, fork_forkserver, prebuild_processor
from medialane.prepare.pool import PreparerPool
from medialane.prepare.processor import (
    NO_PROCESSOR_FACTORY,
    AssembledPrompt,
    Assembler,
    Described,
    FactoryConfig,
    ImageCost,
    ProcessedItem,
    Processor,
)

__all__ = [
    "NO_PROCESSOR_FACTORY",
    "AssembledPrompt",
    "Assembler",
    "Described",
    "FactoryConfig",
    "ImageCost",
    "PrepareConfig",
    "PreparerPool",
    "ProcessedItem",
    "Processor",
    "ProcessorSource",
    "fork_forkserver",
    "prebuild_processor",
]
