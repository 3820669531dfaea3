"""The networks: GPT-2's shape in PyTorch, its key-value cache, and Hugging Face's names for its weights."""
