"""What is told of a run, from the store alone: read models, explain, plots, pages, SQL, exporters."""
