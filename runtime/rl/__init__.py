"""Generation on the ranks that train, from the weights that they train, by the code that trains."""
