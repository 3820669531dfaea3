"""The configuration of network, training and data, validated. No torch here."""
