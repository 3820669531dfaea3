"""The configuration of a run: its sections, where it is read from, what a log stores of it, and every key in words."""
