"""Experts → devices from their load: replicas, packing, bounds, and what a placement costs on the links.

place(load, layout) is the whole of it; `greedy` is the published algorithm it is never worse than.
"""
