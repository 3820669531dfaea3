"""A data snapshot's bytes: shards, index, manifest, and the copies kept on this machine."""
