"""Several models behind one port: passes each request to the gateways of the model that it names."""

from medialane.gateway.models.router import NameRouter
from medialane.gateway.models.served_models import ServedModel, ServedModels

__all__ = ["NameRouter", "ServedModel", "ServedModels"]
