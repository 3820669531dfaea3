"""Retention and promotion of committed checkpoints: the decisions, which are pure functions, and their operations."""
