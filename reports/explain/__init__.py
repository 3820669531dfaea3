"""The post-mortem of one attempt: its facts, and their text."""
