"""Read models as text: tables, facts and sentences, the same in the terminal, on pages, in notices and artifacts."""
