"""`agentic-opd doctor`: checks of a set-up, one line each, with what to do about what is wrong."""
