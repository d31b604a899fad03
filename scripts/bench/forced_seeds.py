"""Seeds of requests whose texts `forced_turns` decides."""

JUDGE_SEED = 4_000_000_000
"""A judge's hint; the further answers of a request have the seeds behind it."""
JUDGE_SEEDS = range(JUDGE_SEED, JUDGE_SEED + 64)
TURN_SEED = 5_000_000_000
"""An agent's turn; so do all larger seeds, each with a text of its own."""
