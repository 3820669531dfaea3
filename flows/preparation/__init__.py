"""What is checked and planned before a run starts."""
