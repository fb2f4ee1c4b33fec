"""Generation of completions on the training ranks, with the training weights and the training code."""
