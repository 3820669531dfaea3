"""Read models: one record for each thing a reader asks for, with CONTRACT's field names; SQL over them."""
