"""The demo policy: its training data (variants, transcripts), its measurement, and its weights in `policy/`.

It shows the machinery, not quality. `scripts/demo_policy/train` trains it from nothing. `mini_swe/` is an adapter that
teaches it another agent's format.
"""

from pathlib import Path

POLICY_DIR = Path(__file__).parent / "policy"
"""The trained policy: config, tokenizer and weights, as `vllm serve` and transformers read them."""
