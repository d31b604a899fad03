"""`python -m agentic_opd.env serve | process | evaluate`."""

from agentic_opd.env.opd import AgenticOPDEnv

if __name__ == "__main__":
    AgenticOPDEnv.cli()
