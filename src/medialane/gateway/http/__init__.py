"""The HTTP side of a gateway: connections and their limits, who may ask for what, ids, errors, health, and metrics."""
