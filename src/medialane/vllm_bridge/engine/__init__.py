"""AsyncLLM as the engine of a worker: requests and outputs converted, KV events, our code in its processes."""
