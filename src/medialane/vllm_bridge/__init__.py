"""Everything that knows vLLM, in five rooms. Each imports only those above it.

* `seams`: the private names of vLLM that we use, one table of them, and a probe that says which changed.
* `items`: media items: processing one, its header, the layout of its placeholders, options, what is found out at start.
* `encoder_cache`: embeddings in the arena: loading them into vLLM's encoder cache, and saving them.
* `engine`: AsyncLLM as a worker's engine: requests and outputs converted, KV events.
* `frontend`: vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling.
"""
