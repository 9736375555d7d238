"""One request of a client, from its prompt to the end of its answer.

`scope` owns what a request takes, `app_backend` is what vLLM's app calls, `media` finds the items of its prompts, and
`run` shows how it is sent to workers (`attempts`, `dispatch`), streamed, and goes on elsewhere. This module has no
names of its own: others of the gateway import what they need of the files, which form layers.
"""
