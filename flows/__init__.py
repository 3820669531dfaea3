"""What happens, in what order: thin Prefect flows, the `cairn` command, run configuration."""
