"""Copies of a run's curve for other tools: best effort, read from the store, never in the way of training."""
