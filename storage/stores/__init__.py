"""Object stores with an atomic create-if-absent: local files and S3."""
