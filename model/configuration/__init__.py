"""What users write about network, training and data, validated. No torch here."""
