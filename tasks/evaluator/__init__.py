"""Measures a committed checkpoint in a process of its own."""
