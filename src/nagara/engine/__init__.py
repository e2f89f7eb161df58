"""LLM inference: requests, blocks, schedule, streams, sampling, an OpenAI server."""
