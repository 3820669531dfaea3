"""A checkpoint's bytes: staged, verified, held, superseded, deleted."""
