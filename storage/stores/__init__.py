"""Object stores that exclude: local files, memory, S3, and what else fsspec opens."""
