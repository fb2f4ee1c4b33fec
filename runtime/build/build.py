"""A build as the runtime uses it: the plan, the programs, and the emitted modules of one pipeline rank.

All of it is parsed and run from the bytes that were read and verified when the build was opened
(runtime/build/files.py): what is in its folder afterwards changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import ModuleType

from runtime.build.certificate import CertificateError, check_collectives, check_start, program_names, recheck
from runtime.build.files import BuildError, OtherBuildError, read, versions
from runtime.build.modules import BuildModules
from runtime.contract import RunPlan, RunProgram, check_programs
from runtime.contract.names import ProgramName
from runtime.system.strict_json import FormError

__all__ = ["Build", "BuildError", "OtherBuildError"]

_COPIES = count(1)  # of modules, in this process


@dataclass(frozen=True)
class Build:
    """`files`: path in the folder → its verified bytes, the manifest apart. `versions`: of
    what compiled it, by package. `digest`: of the manifest, names the build.

    `edits`: how the folder differs from what was compiled, a printable line each; only a build that was opened with
    `edited` has any.
    """

    folder: Path
    files: Mapping[str, bytes] = field(repr=False)
    plan: RunPlan = field(repr=False)
    programs: Mapping[ProgramName, RunProgram] = field(repr=False)  # by file name without suffix: train_8, evaluate_2
    versions: Mapping[str, str]
    digest: str
    edits: tuple[str, ...] = ()

    @staticmethod
    def open(folder: Path, expect: str | None = None, *, edited: bool = False) -> Build:
        """Read and verify files, versions and certificates, and read the plan.

        expect: the digest that the build must have. edited: differences from what was compiled are told in `edits` and
        are no error, as long as the plan can be read. Raises BuildError naming what is wrong; OtherBuildError for
        another digest.
        """
        found = read(folder, expect, edited=edited)
        edits, programs = list(found.edits), None
        try:
            check_versions(folder, found.versions)
            if not edits:
                programs = recheck(found.files, found.digests)
        except (BuildError, CertificateError) as error:
            refusal = (
                error
                if isinstance(error, BuildError)
                else BuildError(f"{folder} is not what was proven: {error}; run dsc compile again")
            )
            if not edited:
                raise refusal from None
            edits.append(str(refusal))
        if "plan.json" not in found.files:
            raise BuildError("; ".join(edits))
        file = "plan.json"
        try:
            plan = RunPlan.from_json(found.files[file])
            if programs is None:  # of an edited build
                programs = {}
                for name in program_names(found.files):
                    file = f"program/{name}.json"
                    programs[name] = RunProgram.from_json(found.files[file])
                file = "plan.json"
            check_programs(plan, programs)
            check_collectives(plan, programs)
            check_start(plan, programs)
        except CertificateError as error:
            raise BuildError(f"{folder} is not what was proven: {error}; run dsc compile again") from None
        except FormError as error:
            raise BuildError(f"{folder} is not what dsc compile wrote: {file}: {error}; compile it again") from None
        ranks = range(plan.mesh.pp)
        stages = {f"stages/rank_{rank}.py" for rank in ranks}
        if stages != {name for name in found.files if name.startswith("stages/")}:
            raise BuildError(
                f"{folder} is not what dsc compile wrote: its stages are not those of {len(ranks)} pipeline ranks;"
                " compile it again"
            )
        return Build(folder, found.files, plan, programs, found.versions, found.digest, tuple(edits))

    def bodies(self, pipeline_rank: int) -> Mapping[str, Callable[..., None]]:
        """What `stages/rank_<r>.py` calls its bodies, by name."""
        return self.module(f"stages.rank_{pipeline_rank}").BODIES

    def module(self, name: str) -> ModuleType:
        """An emitted module by its name below the build: `segments.head_T16_D16_6c24e5`."""
        return self._modules.load(name)

    def changed_module(self, name: str, change: Callable[[ModuleType], None]) -> ModuleType:
        """An emitted module, loaded anew, with other segments below it: `change` is made to each that it imports."""
        again = replace(self._modules, package=f"{self._modules.package}_{next(_COPIES)}")
        module = again.load(name)
        for loaded, segment in list(sys.modules.items()):
            if loaded.startswith(f"{again.package}.segments."):
                change(segment)
        return module

    def path(self, name: str) -> Path | None:
        """Where a file of the build is, for a module's `__file__`; None where the build has none of that name."""
        return self._modules.folder / name if name in self.files else None

    @cached_property
    def _modules(self) -> BuildModules:
        sources = {name: data for name, data in self.files.items() if name.endswith(".py") and "/" in name}
        return BuildModules(f"dsc_build_{self.digest[:16]}", self.folder.absolute(), sources)


def check_versions(folder: Path, compiled_by: Mapping[str, str]) -> None:
    """Raise BuildError unless a build was compiled by the versions that are installed: what another one traced calls
    other ops, or the same ops in another order, and may train something else."""
    here = versions()
    if compiled_by != here:
        differs = [name for name in (*here, *(compiled_by.keys() - here)) if compiled_by.get(name) != here.get(name)]
        was = ", ".join(f"{name} {compiled_by.get(name, 'none')}" for name in differs)
        now = ", ".join(f"{name} {here.get(name, 'none')}" for name in differs)
        raise BuildError(f"{folder} was compiled with {was}, and {now} is installed: run dsc compile again")
