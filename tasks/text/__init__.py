"""Text for people: sanitized, formatted, printed to a terminal."""
