"""Explain numbers that cannot all be right: find the smallest set of lines that contradict each other, and edits.

Imported only when a joint rule is broken. Every edit has been tried on the spec itself. If a search would take too
long, the explanation is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsl.conflict.search import LineChange, RuleProblem, RuleRow, TooManyTriesError
from dsl.conflict.sheet import (
    DATA,
    HEADS,
    LAST,
    MODEL,
    PRECISION,
    ROUTED,
    SCHEDULE,
    WORLD,
    SpecSheet,
    Variable,
    text_of,
    value_at,
    variables,
    with_one_node,
)
from dsl.messages.diagnostics import Conflict, Diagnostic, Edit, Source, Span, in_order
from dsl.rules import JOINT, are_related, has_failed_read
from dsl.rules.finding import Finding, Rule
from dsl.rules.resources import compute_keeps_sms, state_fits
from dsl.schema import Model, Spec
from dsl.schema.paths import check_key, check_paths

NODES, DEVICES = check_paths("cluster.nodes", "cluster.node.devices")
OF_A_KIND = (compute_keeps_sms, state_fits)  # rules about a kind of device
MAX_CONFLICTS = 5  # explained in one spec; further mistakes keep their own hints
MAX_VARIABLES = 150  # in one search
MAX_NAMED = 8  # lines named by messages that a resolution may change together
MAX_SHOWN = 5  # resolutions
MAX_MORE = 2  # lines that a conflict may have beyond the fewest, if its message is about them
MAX_VERIFIED = 15  # resolutions to try on the spec, about 2 ms each
SIZES = (LAST, HEADS[0], ROUTED[0], check_key(Model, "vocab"))  # keys of the model that determine its size
Identity = tuple[str, Span | None]  # code and position of a message
Resolution = tuple[tuple[Edit, ...], set[Identity]]  # edits, and the messages that remain after them


@dataclass(frozen=True)
class Subject:
    """A resolved spec with mistakes."""

    spec: Spec
    origins: Mapping[str, Span]
    failed: Collection[str]
    sources: Sequence[Source]
    constants: Collection[str]  # names of `let`
    mistakes_after: Callable[[Mapping[Span, str]], Iterable[Diagnostic]]  # mistakes after replacing some values


@dataclass(frozen=True)
class Violation:
    """A broken rule, its message, and the variables it depends on."""

    path: str
    message: Diagnostic
    paths: frozenset[str]
    rule: Rule | None  # None: reported while resolving


def explain_conflicts(
    subject: Subject, reported: Sequence[Diagnostic], findings: Sequence[tuple[Rule, Finding, Diagnostic]]
) -> list[Diagnostic]:
    """Return all messages. The first message that a conflict explains gets that conflict."""
    by_path, joint = variables(subject.spec, subject.origins, subject.failed, subject.constants), JOINT
    if value_at(subject.spec, "cluster.more") is not None:
        if any(path.startswith("cluster") for path in subject.failed) or "cluster" not in subject.origins:
            return [*reported, *(message for _, _, message in findings)]
        subject = replace(subject, spec=with_one_node(subject.spec))
        by_path |= _mixed_cluster_variables(subject.spec.cluster.world, subject.origins["cluster"])
        joint = tuple(row for row in JOINT if row[1] not in OF_A_KIND)
    failed = [path for path in subject.failed if path != DATA or path not in by_path or not {*WORLD} <= by_path.keys()]
    rows = [
        RuleRow(frozenset(path for path in by_path if _reads(reads, path)), rule)
        for reads, rule in joint
        if not has_failed_read(reads, failed)
    ]
    of_rule = {row.rule: row.paths for row in rows}
    broken = [
        Violation(finding.path, message, _paths_of_finding(finding, of_rule[rule], rule, by_path), rule)
        for rule, finding, message in findings
        if rule in of_rule
    ]
    broken += [
        Violation(DATA, message, frozenset({*WORLD, DATA, SCHEDULE} & by_path.keys()), None)
        for message in reported
        if message.code == "E0801" and {*WORLD} <= by_path.keys()
    ]
    messages = [*reported, *(message for _, _, message in findings)]
    of_model = any(all(path.startswith("model.") for path in violation.paths) for violation in broken)
    # if the model contradicts itself, its memory is left out: it is checked after the model is fixed
    examined = [violation for violation in broken if not (of_model and violation.rule is state_fits)]
    for group in _group_by_variables(examined)[:MAX_CONFLICTS]:
        messages = _explain(subject, by_path, rows, group, examined, broken, messages)
    return messages


def _mixed_cluster_variables(world: int, span: Span) -> dict[str, Variable]:
    """Variables of a cluster with several kinds of nodes: the line that names the cluster sets the number of
    devices."""
    return {
        NODES: Variable(NODES, 1, is_fixed=True),
        DEVICES: Variable(DEVICES, world, span),
    }


def _reads(reads: Sequence[str], path: str) -> bool:
    """Whether a rule reads a variable; whole models and precisions count only if its row names them."""
    return path in reads if path in (MODEL, PRECISION) else any(are_related(read, path) for read in reads)


def _paths_of_finding(
    finding: Finding, paths: frozenset[str], rule: Rule, by_path: Mapping[str, Variable]
) -> frozenset[str]:
    """The variables that a finding depends on: of layers, only those that it names; for derived values, also their
    sources.
    """
    named = (finding.path, *(path for _, path in finding.notes))
    layers = {path.split(".")[2] for path in named if path.startswith("model.layers.")}
    relevant = {
        path
        for path in paths
        if not path.startswith("model.layers.") or path.endswith(".last") or path.split(".")[2] in layers
    }
    if DATA in relevant and by_path[DATA].span is None:
        relevant |= {*WORLD}
    if SCHEDULE in relevant and by_path[SCHEDULE].span is None:
        relevant.add("parallel.pipeline")
    return frozenset(relevant & by_path.keys())


def _group_by_variables(broken: Sequence[Violation]) -> list[list[Violation]]:
    """Group broken rules that share a variable, directly or through other rules."""
    groups: list[list[Violation]] = []
    for violation in broken:
        connected = [group for group in groups if any(violation.paths & member.paths for member in group)]
        groups = [group for group in groups if group not in connected]
        groups.append([*(member for group in connected for member in group), violation])
    return groups


def _explain(
    subject: Subject,
    by_path: Mapping[str, Variable],
    rows: Sequence[RuleRow],
    group: Sequence[Violation],
    examined: Sequence[Violation],
    broken: Sequence[Violation],
    messages: list[Diagnostic],
) -> list[Diagnostic]:
    """Add the explanation of one group to the messages. `examined`: the broken rules that belong to any group."""
    memory_at_stake = any(violation.rule is state_fits for violation in group)
    violations_outside = [violation for violation in examined if violation not in group]
    ignored = {(violation.message.code, violation.path) for violation in broken if violation not in group}
    reachable = _connected_paths(frozenset().union(*(violation.paths for violation in group)), rows, memory_at_stake)
    paths_outside = frozenset().union(*(violation.paths for violation in violations_outside))
    # values that are unknown and that this group cannot set, or that another conflict explains
    unknown = {
        path
        for path, variable in by_path.items()
        if variable.value is None and (path not in reachable or path in paths_outside)
    }
    reachable -= unknown
    group_variables = {
        path: _without_line(variable) if path in paths_outside else variable
        for path, variable in by_path.items()
        if path in reachable
    }
    if len(group_variables) > MAX_VARIABLES:
        return messages
    group_rows = [row for row in rows if row.paths & reachable and not row.paths & unknown]
    problem = RuleProblem(SpecSheet(subject.spec), group_variables, group_rows, ignored)
    source_order = _source_order(subject.sources)
    named = {subject.origins.get(violation.path) for violation in group} | {
        note.span for violation in group for note in violation.message.notes
    }
    lines = sorted(problem.lines, key=lambda line: (line not in named, source_order(line)))
    conflict = _smallest_conflict(problem, by_path, group, lines, subject.sources, memory_at_stake)
    fixed = {DEVICES} if NODES in by_path and by_path[NODES].is_fixed else set()
    offered = [
        line for line in sorted(lines, key=source_order) if not _is_fixed(problem.lines[line], memory_at_stake, fixed)
    ]
    named_lines = {subject.origins.get(violation.path) for violation in group}
    resolutions: list[Resolution] = []
    of_model = all(path.startswith("model.") for violation in group for path in violation.paths)
    # Changing the model is a different experiment, so it is offered only if nothing else fixes the spec; its size is
    # changed only if the model contradicts itself.
    for depth in range(3 if of_model else 2):
        lines = [line for line in offered if max(map(_model_depth, problem.lines[line])) <= depth]
        if not resolutions and any(_model_depth(path) == depth for line in lines for path in problem.lines[line]):
            named_ones = [line for line in lines if line in named_lines][:MAX_NAMED]
            changes = problem.changes(lines, named_ones, [violation.paths for violation in group])
            resolutions = _verified_resolutions(
                subject, problem, changes, [violation.message for violation in group], messages, source_order
            )
    explanation = Conflict(
        tuple(sorted(conflict or (), key=source_order)),
        tuple(edits for edits, _ in resolutions),
        frozenset(_identity(message) for message in messages).difference(*(remaining for _, remaining in resolutions)),
    )
    return _add_conflict(messages, group, explanation, subject.sources, memory_at_stake)


def _smallest_conflict(
    problem: RuleProblem,
    by_path: Mapping[str, Variable],
    group: Sequence[Violation],
    lines: Sequence[Span],
    sources: Sequence[Source],
    memory_at_stake: bool,
) -> frozenset[Span] | None:
    """Return the smallest set of contradicting lines; or one with a few more lines that the message is about.

    `expert = 32` and `batch = 1000` always contradict each other, since expert divides data, and data the batch. But if
    the message is that expert does not divide data = 16, the lines that make data 16 explain it better.
    """
    order = {
        message: index for index, message in enumerate(in_order((violation.message for violation in group), sources))
    }
    violation_lines = [
        [line for line in lines if any(by_path[path].span == line for path in violation.paths & by_path.keys())]
        for violation in sorted(group, key=lambda violation: order.get(violation.message, len(order)))
    ]
    try:
        fewest = problem.smallest_conflict(lines, memory_at_stake)
        if fewest is None or any(fewest <= {*message_lines} for message_lines in violation_lines):
            return fewest
    except TooManyTriesError:
        fewest = None
    try:
        direct = problem.smallest_conflict(violation_lines[0], memory_at_stake)
    except TooManyTriesError:
        return fewest
    is_near = direct is not None and (fewest is None or len(direct) <= len(fewest) + MAX_MORE)
    return direct if is_near else fewest


def _without_line(variable: Variable) -> Variable:
    """A variable without a line: it belongs to another conflict, which has its own edits."""
    return replace(variable, span=None)


def _model_depth(path: str) -> int:
    """How much a change of a variable changes the model: 0 not at all, 1 how it works, 2 its size."""
    return 0 if not path.startswith("model.") else 2 if path.rpartition(".")[2] in SIZES else 1


def _is_fixed(paths: Collection[str], memory_at_stake: bool, fixed: Collection[str]) -> bool:
    """Whether no edit may change a line: it sets a fact of the device, a path in `fixed`, or, if memory is too small,
    the model."""
    return any(
        path.startswith("cluster.node.device.") or path in fixed or (memory_at_stake and path.startswith("model."))
        for path in paths
    )


def _connected_paths(paths: frozenset[str], rows: Sequence[RuleRow], memory_at_stake: bool) -> frozenset[str]:
    """All variables that rules connect to these, directly or through others."""
    while True:
        reached = paths.union(
            *(row.paths for row in rows if row.paths & paths and (memory_at_stake or row.rule is not state_fits))
        )
        if reached == paths:
            return paths
        paths = reached


def _source_order(sources: Sequence[Source]) -> Callable[[Span], tuple[int, int]]:
    ranks = {source: index for index, source in enumerate(sources)}
    return lambda span: (ranks.get(span.source, len(ranks)), span.start)


def _verified_resolutions(
    subject: Subject,
    problem: RuleProblem,
    changes: Iterable[LineChange],
    resolved: Sequence[Diagnostic],
    messages: Sequence[Diagnostic],
    source_order: Callable[[Span], tuple[int, int]],
) -> list[Resolution]:
    """Return the edits of each change that fixes the group and breaks nothing else, best first, with the messages that
    remain after them."""
    ranked = []
    for change in changes:
        texts = {}
        for path, value in change.values.items():
            variable = problem.variables[path]
            assert variable.span is not None
            texts[variable.span] = text_of(variable, value, subject.spec)
        edits = tuple(Edit(span, texts[span]) for span in sorted(texts, key=source_order))
        # changes of the cluster come after those of the plan
        changes_cluster = any(path.startswith("cluster.") for path in change.values)
        ranked.append(
            (len(edits), changes_cluster, round(change.size, 9), [source_order(edit.span) for edit in edits], edits)
        )
    remaining = {_identity(message) for message in messages if message not in resolved}
    resolutions: list[Resolution] = []
    for *_, edits in sorted(ranked, key=lambda item: item[:4])[:MAX_VERIFIED]:
        if len(resolutions) == MAX_SHOWN:
            break
        remaining_after = {
            _identity(message) for message in subject.mistakes_after({edit.span: edit.text for edit in edits})
        }
        if remaining_after <= remaining:
            resolutions.append((edits, remaining_after))
    return resolutions


def _identity(message: Diagnostic) -> Identity:
    return message.code, message.span


def _add_conflict(
    messages: list[Diagnostic],
    group: Sequence[Violation],
    conflict: Conflict,
    sources: Sequence[Source],
    memory_at_stake: bool,
) -> list[Diagnostic]:
    """Add a conflict to the first message of its group. Its edits replace the hints of the group's messages."""
    first_message, *later_messages = in_order((violation.message for violation in group), sources)
    is_single_edit = (
        not later_messages and len(conflict.lines) == 1 and all(len(edits) == 1 for edits in conflict.resolutions)
    )
    if is_single_edit or not (conflict.lines or conflict.resolutions):
        return messages
    # the hint about memory says more: it may add `zero`
    hint = "" if conflict.resolutions and not memory_at_stake else first_message.hint
    changed = {first_message: _without_listed_places(first_message, conflict.lines, hint=hint, conflict=conflict)}
    if conflict.resolutions:
        hint = f"the edits for {first_message.code} fix this too"
        changed |= {message: _without_listed_places(message, conflict.lines, hint=hint) for message in later_messages}
    return [changed.get(message, message) for message in messages]


def _without_listed_places(message: Diagnostic, lines: Collection[Span], **changes: Any) -> Diagnostic:
    """Return a message without the notes and places that its conflict lists already."""
    notes = tuple(
        replace(note, places=tuple(place for place in note.places if place not in lines))
        for note in message.notes
        if note.span not in lines
    )
    return replace(message, notes=notes, **changes)
