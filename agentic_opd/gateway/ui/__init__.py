"""The page `/ui` of a gateway: live sessions, feedback, and learning curves."""
