"""Types that flow between rooms, errors and hashes. Imports nothing else of medialane, no torch and no vllm."""
