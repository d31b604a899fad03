"""The HTML report: a JSONL of scored groups -> one self-contained file to look at (`python -m agentic_opd.report`)."""
