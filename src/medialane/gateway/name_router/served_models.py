"""The models behind the port: their gateways, and the names by which clients know them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from medialane.gateway.name_router.gateways import Gateways

logger = logging.getLogger(__name__)

#: Names of adapters that are remembered for each model.
MAX_LEARNED = 4096


class ServedModel(msgspec.Struct, frozen=True):
    """What the router is told of a model: `label` is its table's name; `names` are those of `--served-model-name`,
    `adapters` those of `--lora-modules`, `sockets` the paths at which its gateways listen."""

    label: str
    names: tuple[str, ...]
    sockets: tuple[str, ...]
    adapters: tuple[str, ...] = ()


class Model:
    """One of them, with its gateways."""

    def __init__(self, served: ServedModel) -> None:
        self.label = served.label
        self.names = served.names
        self.adapters = served.adapters
        self.gateways = Gateways(served.sockets)


class ServedModels:
    """All of them, in the order of the file, by the names of models and adapters. Adapters that are loaded at run time
    are learned from the models' lists."""

    def __init__(self, served: Sequence[ServedModel]) -> None:
        self.all = [Model(each) for each in served]
        self._fixed = {name: each for each in self.all for name in (*each.names, *each.adapters)}
        self._learned: dict[str, Model] = {}
        #: Names of several models, which were reported.
        self._ambiguous: set[str] = set()

    def __iter__(self) -> Iterator[Model]:
        return iter(self.all)

    @property
    def names(self) -> list[str]:
        """The names of the models themselves."""
        return [name for each in self.all for name in each.names]

    def find(self, name: str | None) -> Model | None:
        return None if name is None else self._fixed.get(name) or self._learned.get(name)

    def any_serving(self) -> Model:
        """Return the first model whose gateways listen; if none do, the first."""
        return next((each for each in self.all if each.gateways.is_listening()), self.all[0])

    def learn(self, model: Model, names: Iterable[str]) -> None:
        """Remember what a model lists; a name that is already that of another one stays so."""
        self._learned = {name: each for name, each in self._learned.items() if each is not model}
        for name in list(names)[:MAX_LEARNED]:
            if (known := self.find(name)) is None:
                self._learned[name] = model
            elif known is not model and name not in self._ambiguous:
                self._ambiguous.add(name)
                logger.warning("%s has an adapter named %s, which requests get at %s", model.label, name, known.label)

    async def close(self) -> None:
        for each in self.all:
            await each.gateways.close()
