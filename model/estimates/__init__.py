"""Numbers known before training: memory, floating-point operations, which numerics this machine runs fastest."""
