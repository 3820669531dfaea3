"""Word of the decisions in a run's log that a person wants to hear of: a command, a webhook, whatever else receives."""
