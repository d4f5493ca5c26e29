"""Posteriors of functions of space from the nearest rows."""
