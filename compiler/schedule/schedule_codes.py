"""The rule behind the code of a schedule's file. A code is never given to another rule."""

from __future__ import annotations

CODES = {"S0101": "the schedule of a file is legal, free of deadlock, and of the run's sizes"}
MORE = {
    "S0101": "A file is in the notation (`dsc schedule SPEC --format text` writes it), in its JSON form, or torch's "
    "CSV. It has the run's pipeline ranks, and the micro-batches of a step at the largest batch; smaller batches of "
    "a ramp run a schedule of dsc on the same stages. Every stage runs F, then B or I and W, once on every "
    "micro-batch; O and R between F and B or I copy what F saved to the host and back. `dsc schedule FILE` checks one "
    "without a spec.",
}
