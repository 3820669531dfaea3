"""Measuring a committed checkpoint, in processes of its own."""
