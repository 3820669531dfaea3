"""What a person uses: the command."""
