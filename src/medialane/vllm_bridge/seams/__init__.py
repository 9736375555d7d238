"""vLLM's private seams: all undocumented vLLM interfaces that medialane uses.

`table` lists them, `probe` compares the table with the installed vLLM, and the other modules (adapters) are the only
ones that refer to them: they offer the rest of `vllm_bridge` functions and classes with public names.
`tests/test_architecture.py` enforces that; `docs/upgrading-vllm.md` describes how to fix each kind of seam.

Nothing is imported here: a gateway loads no engine, and the table is readable where vLLM is broken or absent.
"""
