"""Tries a retry policy on failures before they happen."""
