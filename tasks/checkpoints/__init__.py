"""Operations on committed checkpoints that read no tensors: sweep and promotion."""
