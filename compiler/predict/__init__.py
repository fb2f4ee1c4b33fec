"""The planner: what a run takes, predicted from its spec before anything runs. Torch-free."""
