"""This process and machine: placement, memory, speed, folders."""
