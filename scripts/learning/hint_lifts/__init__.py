"""How much hints change the pass rate: scripts/learning/measure_hints."""
