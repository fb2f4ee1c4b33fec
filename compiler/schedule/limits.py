"""How large a schedule may be that is made, read or drawn: bounds before work."""

from __future__ import annotations

MAX_RANKS = 512  # the largest published pipelines have 16 to 64
MAX_CELLS = 2**20  # stages x micro-batches; each is a forward and a backward, and a second is enough for some 60,000
