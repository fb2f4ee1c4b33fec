"""Two searches over the joint rules: for the smallest set of contradicting lines, and for changes that satisfy all
rules.

The smallest conflict is found by hitting sets (Ignatiev et al., Smallest MUS extraction, CP 2015): a consistent
candidate is grown to a largest consistent set; every conflict contains one of the lines left over. The smallest set
that hits all leftovers is the next candidate; the first inconsistent candidate is a smallest conflict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from dsl.conflict import nearest, weakest
from dsl.conflict.sheet import DATA, MODEL, PRECISION, SCHEDULE, WORLD, SpecSheet, Value, Variable
from dsl.facts.schedules import default_of
from dsl.messages.diagnostics import Span
from dsl.rules.finding import Rule
from dsl.rules.resources import state_fits

MAX_TRIED = 40_000  # values in one search: a third of a second, reached only by constructed specs
MAX_FOR_CHOICE = 4_000  # values to try for further resolutions when there is one: about 30 ms
MEMORY_WEIGHT = 10  # the rule about memory takes as long as this many others
MAX_CHANGED = 3  # lines in one resolution
Line = Span


class TooManyTriesError(Exception):
    """The search was given up, so it has no result."""


@dataclass(frozen=True)
class RuleRow:
    """A rule and the variables it reads."""

    paths: frozenset[str]
    rule: Rule


@dataclass(frozen=True)
class LineChange:
    """New values of the changed lines, and the size of the change."""

    values: Mapping[str, Value]
    size: float


class RuleProblem:
    """The joint rules over the variables of a spec. `ignored`: findings (code, path) that belong to other conflicts."""

    def __init__(
        self,
        sheet: SpecSheet,
        variables: Mapping[str, Variable],
        rows: Sequence[RuleRow],
        ignored: Collection[tuple[str, str]],
    ) -> None:
        self.sheet, self.variables, self.rows, self.ignored = sheet, variables, rows, ignored
        of_layers = sum(path.startswith("model.layers.") for path in variables)
        self.tried, self.weight = 0, 1 + of_layers // 12  # rules about layers read every layer
        self.lines: dict[Line, tuple[str, ...]] = {}
        for path, variable in variables.items():
            if variable.span is not None:
                self.lines[variable.span] = (*self.lines.get(variable.span, ()), path)

    # ------------------------------------------------------------ contradicting lines

    def smallest_conflict(self, preferred: Sequence[Line], memory_at_stake: bool) -> frozenset[Line] | None:
        """Return the smallest set of contradicting lines, or None; of several, that with the most preferred lines,
        which come first in `preferred`."""
        verdicts: dict[frozenset[Line], bool] = {}
        self.tried = 0

        def holds(lines: frozenset[Line]) -> bool:
            if lines not in verdicts:
                verdicts[lines] = self.can_hold(lines, memory_at_stake)
            return verdicts[lines]

        lines = [line for line in preferred if self._can_conflict(line, memory_at_stake)]
        if holds(frozenset(lines)):
            return None
        left_over: list[frozenset[Line]] = []
        size = 0
        while True:
            candidate = self._hitting_set(lines, left_over, size)
            size = len(candidate)
            if not holds(candidate):
                return candidate
            grown = candidate
            for line in reversed(lines):
                if line not in grown and holds(grown | {line}):
                    grown |= {line}
            left_over.append(frozenset(lines) - grown)

    def _hitting_set(self, lines: Sequence[Line], left_over: Sequence[frozenset[Line]], least: int) -> frozenset[Line]:
        """The first smallest set of lines with at least one line of each set in `left_over`."""
        masks = [sum(1 << lines.index(line) for line in line_set) for line_set in left_over]
        for count in range(least, len(lines) + 1):
            for chosen in combinations(range(len(lines)), count):
                self._count_try()
                mask = sum(1 << index for index in chosen)
                if all(mask & line_mask for line_mask in masks):
                    return frozenset(lines[index] for index in chosen)
        raise AssertionError("all lines together hit everything")

    def _can_conflict(self, line: Line, memory_at_stake: bool) -> bool:
        paths = self.lines[line]
        is_whole_block = any(path in (MODEL, PRECISION) for path in paths)
        return (memory_at_stake or not is_whole_block) and all(self.variables[path].constant for path in paths)

    def can_hold(self, lines: frozenset[Line], memory_at_stake: bool) -> bool:
        """Whether all rules can be satisfied with these lines by some values of the other variables."""
        fixed = {
            path: value
            for line in lines
            for path in self.lines[line]
            if (value := self._written_value(path)) is not None
        }
        fixed |= {
            path: variable.value
            for path, variable in self.variables.items()
            if variable.is_fixed and variable.value is not None
        }
        if MODEL in fixed:  # the whole model is fixed
            fixed |= {
                path: value
                for path in self.variables
                if path.startswith("model.") and (value := self._written_value(path))
            }
        checks_memory = memory_at_stake and MODEL in fixed and PRECISION in fixed
        order = sorted(self.variables, key=weakest.order_index)
        due = self._rules_due(order, [row for row in self.rows if checks_memory or row.rule is not state_fits])
        view = weakest.ChoiceView(self.variables, fixed, {}, checks_memory)

        def values(path: str) -> Sequence[Value]:
            if path in fixed:
                return (fixed[path],)
            span = self.variables[path].span
            tied = (
                [view.chosen[sibling] for sibling in self.lines.get(span, ()) if sibling in view.chosen] if span else []
            )
            return tied[:1] or tuple(weakest.weakest_values(path, view))

        def descend(depth: int) -> bool:
            if depth == len(order):
                return True
            path = order[depth]
            for value in values(path):
                self._count_try()
                view.chosen[path] = value
                self._set_value(path, value)
                if all(self.holds(row) for row in due[depth]) and descend(depth + 1):
                    return True
            view.chosen.pop(path, None)
            return False

        return descend(0)

    # ------------------------------------------------------------ changes that fix the spec

    def changes(
        self, offered: Sequence[Line], named: Sequence[Line], broken: Sequence[frozenset[str]]
    ) -> list[LineChange]:
        """Return the smallest change that satisfies all rules for each set of lines that may change, fewest lines
        first.

        Each set has a line that affects each broken rule. More lines are changed only if fewer leave no choice, and
        more than three only among the lines in `named`, which the messages name.
        """
        self.tried = 0
        written = {path: value for path in self.variables if (value := self._written_value(path)) is not None}
        for path, value in written.items():
            self._set_value(path, value)
        unmet = [
            row for row in self.rows if row.paths & self.variables.keys() <= written.keys() and not self.holds(row)
        ]
        changes: list[LineChange] = []
        try:
            for count in range(1, MAX_CHANGED + 1):
                if len(changes) >= (1 if count == MAX_CHANGED else 2):
                    break
                changes += self._changes_of(count, offered, broken, unmet, changes)
            for count in range(MAX_CHANGED + 1, 0 if changes else len(named) + 1):
                changes = changes or self._changes_of(count, named, broken, unmet, ())
        except TooManyTriesError:
            pass  # the changes found so far are complete results
        return changes

    def _changes_of(
        self,
        count: int,
        offered: Sequence[Line],
        broken: Sequence[frozenset[str]],
        unmet: Sequence[RuleRow],
        smaller_changes: Sequence[LineChange],
    ) -> list[LineChange]:
        """The changes of `count` lines, without supersets of the changes in `smaller_changes`."""
        changes: list[LineChange] = []
        used = [frozenset(change.values) for change in smaller_changes]
        num_tried_before = self.tried
        for lines in combinations(offered, count):
            self._count_try()
            paths = {path for line in lines for path in self.lines[line]}
            if smaller_changes and self.tried - num_tried_before > MAX_FOR_CHOICE:
                break
            if all(rule_paths & paths for rule_paths in broken) and not any(smaller <= paths for smaller in used):
                change = self._smallest_change(paths, unmet)
                if change is not None:
                    changes.append(change)
        return changes

    def _smallest_change(self, paths: Collection[str], broken: Sequence[RuleRow]) -> LineChange | None:
        """The smallest change of these variables that satisfies all rules, with the others as written."""
        values = {
            path: value
            for path in self.variables
            if path not in paths and (value := self._written_value(path)) is not None
        }
        order = sorted(
            {*paths, *(path for path in (DATA, SCHEDULE) if self._is_derived(path))}, key=nearest.order_index
        )
        for path, value in values.items():
            self._set_value(path, value)
        for path in order:
            values.pop(path, None)
        if any(not row.paths & {*order} for row in broken):
            return None
        touched = [row for row in self.rows if row.paths & {*order}]
        due = self._rules_due(order, touched)
        best = LineChange({}, inf)

        def descend(depth: int, size: float) -> None:
            nonlocal best
            if depth == len(order):
                best = LineChange({path: values[path] for path in paths}, size)
                return
            path = order[depth]
            for value in self._candidates(path, values):
                cost = nearest.distance(path, self._written_value(path), value) if path in paths else 0.0
                tied = any(
                    self.variables[earlier_path].span == self.variables[path].span for earlier_path in order[:depth]
                )
                if size + (0.0 if tied else cost) >= best.size - 1e-12:
                    break
                self._count_try()
                values[path] = value
                self._set_value(path, value)
                if all(self.holds(row) for row in due[depth]):
                    descend(depth + 1, size + (0.0 if tied else cost))
            values.pop(path, None)

        descend(0, 0.0)
        return best if best.values else None

    def _candidates(self, path: str, view: Mapping[str, Value]) -> Sequence[Value]:
        """The values to try for a variable of a change; a derived variable has at most one."""
        if path == DATA and self._is_derived(path):
            pipeline, tensor, context, nodes, devices = (int(view[name]) for name in WORLD)
            ranks = pipeline * tensor * context
            return (nodes * devices // ranks,) if nodes * devices % ranks == 0 else ()
        if path == SCHEDULE and self._is_derived(path):
            return (default_of(view["parallel.pipeline"]),)
        span = self.variables[path].span
        tied = (
            [view[sibling] for sibling in self.lines.get(span, ()) if sibling != path and sibling in view]
            if span
            else []
        )
        return tied[:1] or nearest.nearest_values(path, self._written_value(path), view, self.sheet)

    def _is_derived(self, path: str) -> bool:
        return path in self.variables and self.variables[path].span is None and {*WORLD} <= self.variables.keys()

    # ------------------------------------------------------------ both

    def holds(self, row: RuleRow) -> bool:
        """Whether a rule has no findings except those of other conflicts."""
        if row.rule is state_fits:
            self.tried += MEMORY_WEIGHT
        return all((finding.code, finding.path) in self.ignored for finding in row.rule(self.sheet.spec))

    def _written_value(self, path: str) -> Value | None:
        return self.variables[path].value

    def _set_value(self, path: str, value: Value) -> None:
        if path not in (MODEL, PRECISION):
            self.sheet.set_value(path, value)

    def _count_try(self) -> None:
        self.tried += self.weight
        if self.tried > MAX_TRIED:
            raise TooManyTriesError

    def _rules_due(self, order: Sequence[str], rows: Sequence[RuleRow]) -> list[list[RuleRow]]:
        """The rules to check after each variable in the order is set: those whose last variable it is."""
        due: list[list[RuleRow]] = [[] for _ in order]
        index_of = {path: index for index, path in enumerate(order)}
        for row in rows:
            indices = [index_of[path] for path in row.paths if path in index_of]
            if indices:
                due[max(indices)].append(row)
        return due
