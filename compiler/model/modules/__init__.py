"""User-defined layers: traces the torch modules that a spec names into graphs."""
