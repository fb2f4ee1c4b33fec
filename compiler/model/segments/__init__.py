"""Joint graphs: a segment and its backward in one graph, split into F, I and W, and printed as plain Python."""
