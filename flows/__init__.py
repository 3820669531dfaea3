"""What happens in what order: the Prefect flows."""
