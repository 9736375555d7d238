"""vLLM's private seams: everything of vLLM that medialane uses and that vLLM documents for nobody.

`table` names all of them, `probe` compares the table with the installed vLLM, and the other modules are the only ones
in which their names occur: they give the rest of `vllm_bridge` functions and classes with public names.
`tests/test_architecture.py` enforces that; `docs/upgrading-vllm.md` says how to mend each kind.

Nothing is imported here: a gateway loads no engine, and the table can be read where vLLM is broken or absent.
"""
