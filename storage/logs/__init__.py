"""Append-only logs of small objects created only if absent, and the folds over them."""
