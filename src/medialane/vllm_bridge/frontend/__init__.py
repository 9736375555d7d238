"""vLLM's own OpenAI app in a gateway: endpoints, rendering, speech, pooling."""
