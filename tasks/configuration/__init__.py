"""What a user writes about a run: sections, files, overrides, and the configuration that a log stores."""
