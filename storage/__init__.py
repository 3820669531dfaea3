"""What is durable: object store, run log, fold, checkpoints, snapshots. Knows no torch and no Prefect."""
