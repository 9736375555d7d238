"""Several models behind one port: passes each request to the gateways of the model that it names."""

from medialane.gateway.models.model_name import MAX_NAME_BYTES, search_of
from medialane.gateway.models.name_router import NameRouter
from medialane.gateway.models.served_models import ServedModel, ServedModels, up_page

__all__ = ["MAX_NAME_BYTES", "NameRouter", "ServedModel", "ServedModels", "search_of", "up_page"]
