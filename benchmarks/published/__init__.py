"""Runs that others published, as specs, and what `dsc plan` predicts of each: docs/published-runs.md."""
