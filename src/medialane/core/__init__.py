"""Types shared by all packages, errors and hashes. Imports no other medialane package, no torch and no vllm."""
