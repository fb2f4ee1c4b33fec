"""Joint graphs: a segment with its backward, split into F, I and W, and printed as plain Python."""
