"""Layers of a user's own: the torch modules that a spec names, as graphs."""
