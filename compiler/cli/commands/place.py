"""`dsc place [RUN|LOAD] [SPEC[:RUN]] [-o FILE]`: assign experts to devices by the load measured in a run.

dsc place runs/pretrain                        uses its load.json and spec; shows all layers before and after
dsc place runs/pretrain -o placement.json      also writes the placement, for the next resume of the run
dsc place --load load.json --groups 8 --nodes 4 --devices 32 --format json

A spec uses a placement with `parallel { placement = "placement.json" }` (docs/placement.md).

Exit codes: 0 done · 2 the load, the spec or the command line is wrong
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_overrides, load_spec, progress, report_error, say
from compiler.cli.commands.output_files import is_folder, refuse_output, refuse_replacing, replace
from compiler.ir.expert_placement import to_text
from compiler.plan.experts.layout import ExpertLayout, Floats, PlacementError
from compiler.plan.experts.place_layers import LayerTask, current_placement, document, file_layers, place_all
from compiler.plan.experts.placement_file import read_load, same_length
from compiler.plan.spec_files import expert_placement_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", nargs="?", metavar="RUN|LOAD", help="a run folder, or a load file")
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="a spec file, or SPEC:RUN; default: the run's")
    add_overrides(parser)
    parser.add_argument("--load", metavar="FILE", help='a load file: {"load": [[tokens of each expert], …]}')
    parser.add_argument("--groups", type=int, metavar="G", help="groups of experts; default: the spec's, or 1")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes; default: the spec's, or 1")
    parser.add_argument(
        "--devices", type=int, metavar="D", help="total number of devices; default: the spec's expert ranks"
    )
    parser.add_argument(
        "--group-rule",
        choices=("auto", "keep", "ignore"),
        default="auto",
        help="keep: each expert group stays on one node; ignore; auto: keep if that costs at most 1%% of balance; "
        "default: auto",
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="also write the placement to a file")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text or json (docs/json.md); default: text"
    )


def run(args: argparse.Namespace) -> int:
    """Place the experts of every layer and print the result. Returns the exit code."""
    try:
        tasks = _tasks(args)
        if tasks is None:
            return EXIT_SPEC
        if args.out is not None:
            refuse_output(args.out, args.load, args.source, f"{args.source}/load.json", args.spec)  # before the work
            refuse_replacing(args.out)
        tell = progress("place")
        try:
            rows = place_all(tasks, args.group_rule, lambda done: tell(f"layer {done + 1} of {len(tasks)}"))
        finally:
            tell("")
        if not any(row.load.any() for row in rows):
            say("warning: the load counts no tokens: all placements are equally balanced")
        if args.out is not None:
            replace(args.out, to_text(file_layers(rows)).encode())
    except PlacementError as error:
        return report_error(str(error), error.hint, args.format)
    except OSError as error:
        return report_error(f"{args.out} cannot be written: {error.strerror}", output_format=args.format)
    if args.format == "json":
        print(json.dumps(document(rows), allow_nan=False))
        return 0
    from compiler.tools.picture.formats import screen_of
    from compiler.tools.report.experts_text import text  # imports rich

    print(text(rows, args.group_rule, args.out and str(args.out), screen_of(sys.stdout)), end="")
    return 0


# ---------------------------------------------------------------- layers to place


def _tasks(args: argparse.Namespace) -> list[LayerTask] | None:
    """The layers to place; None after the mistakes of a spec have been printed."""
    for name in ("groups", "nodes", "devices"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise PlacementError(f"--{name} {value}: must be at least 1")
    if args.load is not None and args.spec is not None:
        raise PlacementError("--load FILE replaces RUN: leave one of them out")
    if args.load is not None and args.source is not None:
        args.spec = args.source  # `dsc place --load FILE SPEC`
    source = args.load or args.source
    if source is None:
        raise PlacementError("which load? Name a run folder or a load file", "dsc place runs/pretrain")
    path, spec = Path(source), args.spec
    if is_folder(path):
        spec = spec or str(path / "spec.resolved")
        path = path / "load.json"
        if not path.is_file():
            raise PlacementError(
                f"{path}: no such file",
                f"{source} is not a run of a model with experts, or has not saved a checkpoint with the load yet",
            )
    loads = read_load(path)
    return _tasks_of_flags(args, path, loads) if spec is None else _tasks_of_spec(args, path, loads, spec)


def _tasks_of_flags(args: argparse.Namespace, path: Path, loads: tuple[Floats, ...]) -> list[LayerTask]:
    if args.set:
        raise PlacementError("-s overrides keys of a spec, and no spec is named", f"dsc place {path} SPEC -s …")
    if args.devices is None:
        raise PlacementError(
            "--devices is missing: name the total number of devices", "or name a spec: dsc place FILE SPEC"
        )
    experts = same_length(path, loads)
    layout = ExpertLayout(experts, args.groups or 1, args.nodes or 1, args.devices).check()
    return [LayerTask(str(index), load, layout, current_placement(layout)) for index, load in enumerate(loads)]


def _tasks_of_spec(
    args: argparse.Namespace, path: Path, loads: tuple[Floats, ...], spec: str
) -> list[LayerTask] | None:
    chosen = load_spec(spec, args.set, args.format)
    if chosen is None:
        return None
    from compiler.plan.experts.spec_placement import layers_with_experts, layout_of, routing_of

    layers = layers_with_experts(chosen.spec)
    if len(layers) != len(loads):
        raise PlacementError(
            f"{path} has {len(loads)} layers, but the model of {spec} has {len(layers)} layers with experts",
            "the load is from another model",
        )
    if args.devices is None and chosen.spec.parallel.expert == 1:
        raise PlacementError("expert = 1: all experts are on every rank", "--devices D, or -s parallel.expert=D")
    per_node: Mapping[str, int] = {}
    if chosen.spec.cluster.more is not None:
        from compiler.plan.expert_nodes import devices_of_nodes

        per_node = devices_of_nodes(chosen.spec)
    at_present = expert_placement_of(chosen.spec)
    tasks = []
    for (name, ffn), load in zip(layers, loads, strict=True):
        if len(load) != ffn.experts:
            raise PlacementError(f"{path} has {len(load)} experts in {name}, but the model has {ffn.experts}")
        sizes = (args.groups, args.nodes, args.devices)
        layout = layout_of(chosen.spec, ffn, *sizes, per_node.get(name)).check()
        current = current_placement(layout, at_present.layers[name] if at_present else None)
        tasks.append(LayerTask(name, load, layout, current, True, routing_of(chosen.spec, ffn)))
    return tasks
