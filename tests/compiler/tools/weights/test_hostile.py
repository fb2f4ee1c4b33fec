"""Damaged and malicious folders: each is refused, naming the file and tensor, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compiler.tools.weights.published import import_, random_model

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    random_model("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """A copy of a published model."""
    copy = tmp_path / "hf"
    copy.mkdir()
    for path in published.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def header(folder: Path, change: Callable[[dict[str, object]], object], file: str = FILE) -> None:
    """Give a file another header; what follows it stays."""
    content = (folder / file).read_bytes()
    size = int.from_bytes(content[:8], "little")
    rows = json.loads(content[8 : 8 + size])
    changed = change(rows)
    text = (changed if isinstance(changed, str) else json.dumps(rows)).encode()
    (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def index(folder: Path, weight_map: object, text: str = "") -> None:
    (folder / INDEX).write_text(text or json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")


def everything_in(folder: Path, file: str = FILE) -> dict[str, str]:
    return dict.fromkeys(load_file(folder / FILE), file)


def tensors(folder: Path, **changed: torch.Tensor | None) -> None:
    """Save the file with other tensors, by names with __ for dots; None: without."""
    saved = load_file(folder / FILE)
    for name, tensor in changed.items():
        saved.pop(name.replace("__", "."), None)
        if tensor is not None:
            saved[name.replace("__", ".")] = tensor
    save_file(saved, folder / FILE, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-10])


def pickled(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def piped(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def linked_to(folder: Path, place: str) -> None:
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(place)


def negative(rows: dict[str, object]) -> None:
    rows[NORM]["shape"] = [-16]  # type: ignore[index]


def huge(rows: dict[str, object]) -> None:
    rows[NORM]["shape"] = [2**62, 2**62]  # type: ignore[index]


def overlapping(rows: dict[str, object]) -> None:
    rows[NORM]["data_offsets"] = [0, 32]  # type: ignore[index]


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, f"{FILE} cannot be read"),
    "empty": (lambda f: (f / FILE).write_bytes(b""), f"{FILE} cannot be read"),
    "header longer than the file": (lambda f: (f / FILE).write_bytes(b"\xff" * 16), f"{FILE} cannot be read"),
    "header is no JSON": (lambda f: header(f, lambda rows: "{" * 100_000), f"{FILE} cannot be read"),
    "negative size": (lambda f: header(f, negative), f"{FILE} cannot be read"),
    "huge size": (lambda f: header(f, huge), f"{FILE} cannot be read"),
    "overlapping": (lambda f: header(f, overlapping), f"{FILE} cannot be read"),
    "a pipe": (piped, f"{FILE} is not a regular file"),
    "a device": (lambda f: linked_to(f, "/dev/zero"), f"{FILE} is not a regular file"),
    "a pickle": (pickled, "pytorch_model.bin is a pickle, and reading one can run code in it"),
    "missing tensor": (lambda f: tensors(f, model__norm__weight=None), f"{NORM} is missing"),
    "foreign tensor": (lambda f: tensors(f, evil=torch.ones(1)), "evil is not a tensor of this model"),
    "another shape": (
        lambda f: tensors(f, model__norm__weight=torch.ones(17)),
        f"{NORM} is 17, but 16 by the config",
    ),
    "another dtype": (
        lambda f: tensors(f, model__norm__weight=torch.ones(16, dtype=torch.int64)),
        f"{NORM} is I64, which is not supported for weights",
    ),
    "index names a missing file": (
        lambda f: index(f, everything_in(f) | {NORM: "model-00002-of-00002.safetensors"}),
        "model-00002-of-00002.safetensors cannot be read",
    ),
    "index leads out": (
        lambda f: index(f, everything_in(f) | {NORM: "../m.safetensors"}),
        "not a file name in this folder",
    ),
    "index has an absolute path": (
        lambda f: index(f, everything_in(f, "/etc/passwd")),
        f"{INDEX}: lm_head.weight is listed in /etc/passwd, which is not a file name in this folder",
    ),
    "index names a tensor that is nowhere": (
        lambda f: index(f, everything_in(f) | {"evil": FILE}),
        f"evil is in no file; the index names {FILE}",
    ),
    "a tensor is not in the index": (
        lambda f: index(f, {name: file for name, file in everything_in(f).items() if name != NORM}),
        f"{NORM} is not in the index",
    ),
    "index repeats a key": (
        lambda f: index(f, None, '{"weight_map": {}, "weight_map": {}}'),
        "weight_map occurs twice",
    ),
    "index is nested": (lambda f: index(f, None, "[" * 200_000), f"{INDEX} cannot be read"),
    "index is a list": (lambda f: index(f, None, "[]"), "has no `weight_map`"),
    "index has numbers": (lambda f: index(f, {NORM: 3}), "has no `weight_map`"),
    "a name that writes on the terminal": (
        lambda f: tensors(f, **{"a\x1b[31m": torch.ones(1)}),
        "is not a tensor of this model",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("watched")
def test_it_is_refused(name: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, message = CASES[name]
    damage(folder)
    assert import_(folder, tmp_path / "m.dsc") == 2
    stderr = capfd.readouterr().err
    assert message in stderr, stderr
    assert all(line.isprintable() and line.startswith(("error: ", " = ")) for line in stderr.splitlines()), stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing is left behind"


def test_a_number_that_is_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors(folder, model__norm__weight=torch.full((16,), float("nan"), dtype=torch.bfloat16))
    with pytest.raises(
        RuntimeError, match=r"model\.safetensors: model\.norm\.weight: holds a number that is not finite"
    ):
        import_(folder, tmp_path / "m.dsc")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing is left behind"


def test_a_tensor_of_two_files_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({NORM: torch.ones(16)}, folder / "more.safetensors")
    index(folder, everything_in(folder) | {NORM: "more.safetensors"})
    assert import_(folder, tmp_path / "m.dsc") == 2
    assert f"more.safetensors: {NORM} is in {FILE} already" in capfd.readouterr().err


def test_all_faults_are_reported_at_once(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors(folder, model__norm__weight=torch.ones(17), lm_head__weight=None, evil=torch.ones(1))
    assert import_(folder, tmp_path / "m.dsc") == 2
    stderr = capfd.readouterr().err
    assert all(message in stderr for message in (f"{NORM} is 17", "lm_head.weight is missing", "evil is not a tensor"))


def test_a_cache_of_the_hub_has_links(folder: Path, tmp_path: Path) -> None:
    """models--org--name/snapshots/<hash>/model.safetensors → ../../blobs/<hash>."""
    (tmp_path / "blob").write_bytes((folder / FILE).read_bytes())
    linked_to(folder, "../blob")
    assert import_(folder, tmp_path / "m.dsc") == 0
