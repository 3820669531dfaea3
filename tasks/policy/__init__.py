"""Pure decisions: values in, values out. No clock, no store, no process."""
