"""How much hints change the pass rate: scripts/measure_hints."""
