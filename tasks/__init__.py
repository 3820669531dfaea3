"""One Prefect task per verb_noun file, the trainer child, and pure policy (failures, budgets)."""
