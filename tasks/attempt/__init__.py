"""The life of an attempt around its training: claim, heartbeat, shutdown requests, end and receipt."""
