"""The actions of a stage: their chains of instructions, the order of these on two lanes, and their times."""
