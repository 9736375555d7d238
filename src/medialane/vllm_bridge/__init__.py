"""Everything that knows vLLM, in five rooms. Each imports only those above it.

* `seams`: the private names of vLLM that we use, one table of them, and a probe that says which changed.
* `items`: media items: processing one, its header, the layout of its placeholders, options.
* `learned`: what is learned of a model at start, in one `ModelProfile`; prompts and validation by it.
* `engine`: AsyncLLM as a worker's engine: requests and outputs converted, KV events, embeddings in the arena.
* `frontend`: vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling.
"""
