"""What is trained: GPT, tokenizer, data order, optimizer, loop, evaluation, generation. Knows no Prefect and no fsspec."""
