"""Measurements, and what they run: a vLLM server, a simulated engine, made-up groups."""
