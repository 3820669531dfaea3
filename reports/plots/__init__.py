"""The curves of a run as a plot."""
