"""A network in use: held-out loss, generated text."""
