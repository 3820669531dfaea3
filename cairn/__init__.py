"""What a person touches: the command."""
