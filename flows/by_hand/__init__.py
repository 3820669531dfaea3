"""What a person does with one committed checkpoint or snapshot, outside any flow."""
