"""What is durable: object store, run log, fold, checkpoints, registry, data snapshots.

Knows neither torch nor Prefect."""
