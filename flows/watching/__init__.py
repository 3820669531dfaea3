"""Continuing runs that nobody owns: looks, decisions, and how a run is started again."""
