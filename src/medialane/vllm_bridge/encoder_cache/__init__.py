"""Embeddings in the arena: loading them into vLLM's encoder cache, and saving them from there."""
