"""Read models: one record for each thing that readers ask for, with CONTRACT's field names; SQL over them."""
