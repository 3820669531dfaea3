"""The post-mortem of one attempt: facts first, then words."""
