"""One run from its opening to the promotion of its best checkpoint."""
