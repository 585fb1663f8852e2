"""Workloads for any OpenAI-compatible server, and a comparison of caches that runs each of them with the same vLLM."""
