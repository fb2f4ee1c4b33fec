"""Place experts on devices by their load: the search, its bounds, and the traffic of a placement on the links.

`place_layer` places one layer. It is never worse than `greedy`, the published algorithm.
"""
