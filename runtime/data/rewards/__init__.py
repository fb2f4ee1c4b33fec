"""Rewards of completions: built-in checks, and functions of the user in separate processes. No torch."""
