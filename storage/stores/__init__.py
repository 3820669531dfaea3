"""Object stores that exclude: local files, memory and S3."""
