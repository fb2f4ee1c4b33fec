"""Configurations of other programs → specs."""
