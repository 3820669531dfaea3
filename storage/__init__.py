"""Durable things: object stores, logs, checkpoints, data snapshots, SQL tables. Knows neither torch nor Prefect."""
