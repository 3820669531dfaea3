"""Checks and plans before a run starts."""
