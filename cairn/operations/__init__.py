"""What a verb does that needs more than a report: sample, export, import, verify, the session with Prefect."""
