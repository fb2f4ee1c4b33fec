"""What an action of a stage executes: its chain of instructions, their order on two lanes, and how long it takes."""
