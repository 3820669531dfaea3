"""SQL tables: their columns, and the packs that cache their rows."""
