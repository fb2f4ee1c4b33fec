"""The planner: predicts the time, memory and cost of a run from its spec, before anything runs. Imports no torch."""
