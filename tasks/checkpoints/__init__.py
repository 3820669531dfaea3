"""What happens to committed checkpoints without their tensors: sweep, and the offer to an alias."""
