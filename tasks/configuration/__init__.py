"""The configuration of a run: its sections, its files, its form in a log, and the description of every key."""
