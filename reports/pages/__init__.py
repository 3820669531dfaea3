"""The report of a run as Markdown and HTML, and the live pages."""
