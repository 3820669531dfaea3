"""The trainer from both sides: its process, the channel to the parent, and how its tensors reach the store."""
