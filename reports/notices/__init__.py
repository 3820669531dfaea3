"""Notices of the decisions in a run's log: to a command, a webhook or any other receiver."""
