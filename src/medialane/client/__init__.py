"""For trainers and tools on a store's host: the tensors that its engines were given, without a copy.

    with medialane.client.features([mm_hash], store="unix:/run/medialane/store.sock") as features:
        pixel_values = features[mm_hash]["pixel_values"].to("cuda")

Importing this loads no torch: that is imported with the first tensor.
"""

from medialane.client.features import Features, FeaturesReleased, ItemTensors, features
from medialane.types.errors import StoreUnavailable, UnknownMedia

__all__ = ["Features", "FeaturesReleased", "ItemTensors", "StoreUnavailable", "UnknownMedia", "features"]
