"""The trained network: GPT, tokenizer, data order, optimizer, loop, evaluation. Knows no Prefect and no store."""
