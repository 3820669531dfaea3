"""What a run does: one Prefect task per verb_noun file, the trainer and evaluator processes, and pure policy."""
