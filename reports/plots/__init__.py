"""The curves of a run as a picture."""
