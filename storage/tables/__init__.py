"""Rows out of folded logs, and the packs they are kept in."""
