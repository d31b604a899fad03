"""Agents before the gateway: those of others as they are, and the demos."""
