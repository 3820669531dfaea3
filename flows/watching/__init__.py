"""Continues unfinished runs that have no live owner."""
