"""The trainer seen from both sides: its process, what is said over the line, and how its tensors reach the store."""
