"""Rewards of completions: checks that are built in, and functions of the user in processes of their own. No torch."""
