"""From a token stream to batches: tokenizer, windows, the deterministic order of samples."""
