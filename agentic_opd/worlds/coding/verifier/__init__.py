"""Verification by hidden tests: counted checks, run apart from the solution; harness/ runs in the sandbox."""
