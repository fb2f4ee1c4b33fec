"""A build for the runtime: the plan, the programs, and the emitted modules of a pipeline rank.

Everything is parsed and executed from the bytes that were read and verified when the build was opened
(runtime/build/files.py). Later changes of its folder have no effect.
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

_COPIES = count(1)  # numbers copies of modules in this process


@dataclass(frozen=True)
class Build:
    """An opened build. `files`: path in the folder → verified bytes, without the manifest. `versions`: package versions
    that compiled it. `digest`: digest of the manifest, which identifies the build.

    `edits`: differences between the folder and the compiled files, a printable line each; only with `edited`.
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
        """Read and verify files, versions and certificates, and parse the plan.

        expect: the required digest of the build. edited: differences from the compiled files are listed in `edits`
        instead of being errors, as long as the plan can be parsed. Raises BuildError with the problem; OtherBuildError
        for another digest.
        """
        build_files = read(folder, expect, edited=edited)
        edits, programs = list(build_files.edits), None
        try:
            check_versions(folder, build_files.versions)
            if not edits:
                programs = recheck(build_files.files, build_files.digests)
        except (BuildError, CertificateError) as error:
            refusal = (
                error
                if isinstance(error, BuildError)
                else BuildError(f"{folder} does not match its proof: {error}; run dsc compile again")
            )
            if not edited:
                raise refusal from None
            edits.append(str(refusal))
        if "plan.json" not in build_files.files:
            raise BuildError("; ".join(edits))
        file = "plan.json"
        try:
            plan = RunPlan.from_json(build_files.files[file])
            if programs is None:  # the build was edited
                programs = {}
                for name in program_names(build_files.files):
                    file = f"program/{name}.json"
                    programs[name] = RunProgram.from_json(build_files.files[file])
                file = "plan.json"
            check_programs(plan, programs)
            check_collectives(plan, programs)
            check_start(plan, programs)
        except CertificateError as error:
            raise BuildError(f"{folder} does not match its proof: {error}; run dsc compile again") from None
        except FormError as error:
            raise BuildError(f"{folder} is not what dsc compile wrote: {file}: {error}; compile it again") from None
        ranks = range(plan.mesh.pp)
        stages = {f"stages/rank_{rank}.py" for rank in ranks}
        if stages != {name for name in build_files.files if name.startswith("stages/")}:
            raise BuildError(
                f"{folder} is not what dsc compile wrote: its stages are not those of {len(ranks)} pipeline ranks;"
                " compile it again"
            )
        return Build(folder, build_files.files, plan, programs, build_files.versions, build_files.digest, tuple(edits))

    def bodies(self, pipeline_rank: int) -> Mapping[str, Callable[..., None]]:
        """Return the bodies in `stages/rank_<r>.py`, by name."""
        return self.module(f"stages.rank_{pipeline_rank}").BODIES

    def module(self, name: str) -> ModuleType:
        """Import an emitted module by its name in the build: `segments.head_T16_D16_6c24e5`."""
        return self._modules.load(name)

    def import_changed_module(self, name: str, change: Callable[[ModuleType], None]) -> ModuleType:
        """Import a fresh copy of an emitted module, and apply `change` to each segment that it imports."""
        modules = replace(self._modules, package=f"{self._modules.package}_{next(_COPIES)}")
        module = modules.load(name)
        for loaded, segment in list(sys.modules.items()):
            if loaded.startswith(f"{modules.package}.segments."):
                change(segment)
        return module

    def path(self, name: str) -> Path | None:
        """Return the path of a file of the build, for a module's `__file__`; None if the build has no such file."""
        return self._modules.folder / name if name in self.files else None

    @cached_property
    def _modules(self) -> BuildModules:
        sources = {name: data for name, data in self.files.items() if name.endswith(".py") and "/" in name}
        return BuildModules(f"dsc_build_{self.digest[:16]}", self.folder.absolute(), sources)


def check_versions(folder: Path, compiled_by: Mapping[str, str]) -> None:
    """Raise BuildError unless a build was compiled with the installed versions: other versions may trace other ops or
    another order, and train differently."""
    installed = versions()
    if compiled_by != installed:
        differs = [
            name
            for name in (*installed, *(compiled_by.keys() - installed))
            if compiled_by.get(name) != installed.get(name)
        ]
        compiled = ", ".join(f"{name} {compiled_by.get(name, 'none')}" for name in differs)
        current = ", ".join(f"{name} {installed.get(name, 'none')}" for name in differs)
        raise BuildError(f"{folder} was compiled with {compiled}, and {current} is installed: run dsc compile again")
