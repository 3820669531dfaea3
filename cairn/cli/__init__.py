"""The `cairn` command: subcommands, options, tables and exit codes."""
