"""The trainer process: its parent's side, its channel to the parent, and how its tensors reach the store."""
