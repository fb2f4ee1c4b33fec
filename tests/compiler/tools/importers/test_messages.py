"""Golden messages and specs of imports. `pytest tests/compiler/tools/importers/test_messages.py --bless` rewrites them.

bad/NAME.json → NAME.txt: the messages of `dsc import hf`, then, if `--lossy` gives a spec, its messages and the spec.
bad/NAME.sh, bad/NAME.yaml → NAME.txt: messages of `dsc import megatron-bridge`; bad/NAME.toml: `dsc import torchtitan`.
configs/NAME.json → specs/NAME.dsc: the specs of published models.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compiler.cli.main import main
from dsl.rules.codes import DETAILS, FILE_CODES

HERE = Path(__file__).parent
BAD = sorted(path.stem for path in (HERE / "bad").glob("*.json"))
PLANS = sorted(path.name for kind in ("sh", "yaml", "toml") for path in (HERE / "bad").glob(f"*.{kind}"))
GOOD = sorted(path.stem for path in (HERE / "configs").glob("*.json"))


def compare(path: Path, text: str, bless: bool) -> None:
    if bless:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BAD)
def test_messages(name: str, bless: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(HERE / "bad")
    text = ""
    for options in ([], ["--lossy", "--model-only"]):
        code = main(["import", "hf", f"{name}.json", *options])
        written, stderr = capfd.readouterr()
        text += f"$ dsc import hf {' '.join([f'{name}.json', *options])}\n{stderr}[exit {code}]\n"
        assert code in (0, 2) and bool(written) == (code == 0)
        if options or code == 0:
            text += written
        if code == 0 or "`--lossy`" not in stderr:
            break
        text += "\n"
    compare(HERE / "bad" / f"{name}.txt", text, bless)


@pytest.mark.parametrize("name", PLANS)
def test_messages_of_plans(
    name: str, bless: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE / "bad")
    system = "torchtitan" if name.endswith(".toml") else "megatron-bridge"
    code = main(["import", system, name])
    written, stderr = capfd.readouterr()
    assert code == 2 and not written
    text = f"$ dsc import {system} {name}\n{stderr}[exit {code}]\n"
    compare(HERE / "bad" / f"{Path(name).stem}.txt", text, bless)


@pytest.mark.parametrize("name", GOOD)
def test_specs(name: str, bless: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(HERE / "configs")
    assert main(["import", "hf", f"{name}.json"]) == 0
    compare(HERE / "specs" / f"{name}.dsc", capfd.readouterr().out, bless)


OWN = {code for code in FILE_CODES if code.startswith("I")}


def test_every_code_is_shown() -> None:
    messages = "".join((HERE / "bad" / f"{Path(name).stem}.txt").read_text("utf-8") for name in (*BAD, *PLANS))
    assert set(re.findall(r"(?:error|warning)\[(I\d+)\]", messages)) == OWN


@pytest.mark.parametrize("code", sorted(OWN))
def test_codes_are_explained(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code.lower()]) == 0
    assert capsys.readouterr().out.startswith(f"{code}: {FILE_CODES[code]}\n\n{DETAILS[code][:40]}")
