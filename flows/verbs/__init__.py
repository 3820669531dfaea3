"""The verbs of the `cairn` command: what a person types, and how answers read on a terminal."""
