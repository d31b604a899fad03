"""The HTML report: a JSONL of scored groups -> one self-contained page with turns, hints and token-level gaps."""
