"""The live page of `cairn ui`: one process that reads a store and answers on the loopback."""
