"""Imports configurations of other programs as specs."""
