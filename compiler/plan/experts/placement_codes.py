"""The rule behind the code of a placement's file. A code is never given to another rule."""

from __future__ import annotations

CODES = {"P0101": "the placement of a file has every expert of every layer once, equally many on each expert rank"}
MORE = {
    "P0101": "`dsc place RUN -o FILE` writes such a file from the load of a run: for each layer the experts of each "
    "device, the moves that lead there, which must agree, and the load. It has the layers of the model, and as many "
    "devices as `parallel.expert`; where that is `auto`, it is as many as the file has. Replicas of an "
    "expert cannot be trained; `dsc place --replicas` plans them for serving.",
}
