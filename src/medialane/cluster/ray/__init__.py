"""Life cycle of workers on a Ray cluster. Requests and tensors never pass through Ray."""
