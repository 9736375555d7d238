"""Connections between processes: framing, the handshake with its secret and TLS, listeners, and the messages between
gateways and workers (`protocol`). It knows no roles: the gateway's end is `gateway.worker_link`, the worker's is
`worker.gateway_link`.
"""
