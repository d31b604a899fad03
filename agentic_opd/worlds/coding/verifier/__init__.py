"""The hidden tests and their verdict: tests as counted checks, run apart from the solution; harness/ runs inside."""
