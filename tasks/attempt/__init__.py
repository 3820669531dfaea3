"""What surrounds an attempt: its claim, its signs of life, the notices it hears, its end and its receipt."""
