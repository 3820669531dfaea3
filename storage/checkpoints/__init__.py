"""The bytes of checkpoints: staged, committed, verified, pinned, superseded, deleted."""
