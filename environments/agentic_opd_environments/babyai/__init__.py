"""The world `babyai`: levels of BabyAI (package minigrid), read and played as text; see docs/babyai.md."""
