"""The types that flow between rooms, the errors, the hash. Imports nothing of ours, no torch, no vllm."""
