"""Everything that speaks to Prefect: servers, states, artifacts, parameters, cancellation."""
