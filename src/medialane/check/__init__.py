"""`medialane check`: the same requests to plain vLLM and to medialane, and their answers compared.

`run` starts both servers; what it sends comes from `kinds`, one file for each kind of endpoint.
"""
