"""LLM inference: requests, blocks, schedule, sampling, an OpenAI server. Installs alone."""
