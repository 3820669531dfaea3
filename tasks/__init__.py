"""The work of a run: one Prefect task per verb_noun file, the trainer and evaluator processes, and pure policy."""
