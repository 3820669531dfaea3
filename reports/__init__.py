"""Reports about runs, from the store alone: read models, SQL, explain, plots, pages, exporters."""
