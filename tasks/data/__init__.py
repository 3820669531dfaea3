"""From text to a data snapshot."""
