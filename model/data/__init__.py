"""Tokenizer, windows over token shards, the deterministic order of samples, and the batch loader."""
