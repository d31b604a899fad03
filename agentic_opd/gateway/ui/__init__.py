"""The page `/ui` of a gateway: sessions as they happen, feedback, and the curves of what was learned."""
