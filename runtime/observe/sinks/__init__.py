"""Exporters of a run's metrics, in a separate process that reads the files of the run (docs/watching.md)."""
