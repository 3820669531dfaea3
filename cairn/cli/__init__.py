"""The command: its verbs, their options, tables and exit codes."""
