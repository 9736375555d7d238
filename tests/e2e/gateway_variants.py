"""Gateways over the same workers, by their flags. Every test of answers asks each of them."""

#: Gateways over the workers and the store of `serve`, each with one hand-over path. Those in APART have a store of
#: their own, with an arena out of the workers' reach, as on another host: the store of `serve` copies from it.
#: `joined` lists no workers: they join it. It has a queue and a limit of the time to first token, to measure both.
#: `encoders` has an encoder, besides, which the tests of encoders start.
GATEWAYS = {
    "features/shm": ("--stage", "features", "--transport", "shm"),
    "features/inline": ("--stage", "features", "--transport", "inline"),
    "decoded/shm": ("--stage", "decoded", "--transport", "shm"),
    "url": ("--stage", "url", "--no-page"),
    "apart": ("--transport", "inline", "--transfer-max-inline-bytes", "1MiB"),
    "features/tcp": ("--stage", "features", "--transport", "tcp"),
    "decoded/tcp": ("--stage", "decoded", "--transport", "tcp"),
    "joined": ("--gateway-queue-requests", "1000", "--gateway-ttft-limit", "600"),
    "encoders": ("--encode-at", "encoders"),
}
#: What the last test of them ends in a gateway (gateways_program.py).
ENDINGS = {"url": "links", "features/inline": "server"}
