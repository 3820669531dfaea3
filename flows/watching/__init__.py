"""Continuing runs without a live owner."""
