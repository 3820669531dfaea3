"""Everything that speaks to Prefect: servers, states, artifacts, approvals, cancellation."""
