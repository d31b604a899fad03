"""The vLLM endpoint plugin (server side). Imports vLLM, and nothing else of this package."""
