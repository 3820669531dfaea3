"""Networks: GPT-2, its key-value cache, and the conversion to and from Hugging Face weights."""
