"""What this process and machine are: placement, memory, speed, folders."""
