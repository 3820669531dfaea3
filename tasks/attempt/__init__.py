"""What surrounds an attempt: claim, heartbeat, notices, end and receipt."""
