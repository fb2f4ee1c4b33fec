"""The rule behind the code of a rate table's file. A code is never given to another rule."""

from __future__ import annotations

CODES = {"R0101": "the rate table of a file is one: classes, shapes and rates as `dsc calibrate` writes them"}
MORE = {
    "R0101": "`dsc calibrate -o rates.json` measures one on this machine, and `--trace` makes one from a traced layer; "
    "docs/rates.md has its form. Plans go by it, and so does what follows from them: which layers are on which stage, "
    "a schedule that is searched for, the order inside of overlapped pairs.",
}
