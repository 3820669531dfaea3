"""Post-mortem and report: facts first, words second, pages last."""
