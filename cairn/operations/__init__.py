"""Commands that need more than a report: sample, export, import, verify, and the session with Prefect."""
