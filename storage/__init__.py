"""What is durable: object stores, logs and their folds, checkpoints, data snapshots, SQL tables.

Knows neither torch nor Prefect.
"""
