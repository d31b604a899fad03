"""`agentic-opd doctor`: checks of a set-up, one line each, with a remedy for each problem."""
