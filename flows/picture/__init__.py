"""The picture of a run: one function draws it for terminal, report and orchestrator."""
