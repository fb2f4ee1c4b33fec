"""Exporters of the numbers of a run, in a process of their own that reads what the run writes (docs/watching.md)."""
