"""Object stores that exclude: local files and S3."""
