"""Places of checkpoint copies: the newest good copy of all is fetched; and which places a run may have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint.places import CopyPlace, FolderPlace, PlaceError, StorePlace, places_of
from runtime.checkpoint.publish import load
from runtime.checkpoint.restore import restore
from runtime.checkpoint.shard_manifest import CheckpointError
from tests.runtime.copied import Run
from tests.runtime.faulty_files import Calls, Killed, kill_at

# ---------------------------------------------------------------- fetching


def test_a_damaged_checkpoint_is_replaced_by_its_copy_before_an_older_one_is_used(
    tmp_path: Path, place: CopyPlace
) -> None:
    run = Run(tmp_path / "run", place, keep=3)
    for step in (1, 2):
        run.save(step)
    shard = tmp_path / "run" / "checkpoints" / "step-00000002" / "shard.0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    notes: list[str] = []
    restored = restore(tmp_path / "run", [place], notes.append)
    assert restored is not None and restored[0] == "step-00000002"
    assert notes == [f"step-00000002 is taken from {place.text}"]
    checkpoint = load(tmp_path / "run" / "checkpoints")
    assert (checkpoint.step, checkpoint.refused) == (2, ())
    assert restore(tmp_path / "run", [place], notes.append) is None, "it has the newest now"
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*step*")) == [
        "step-00000001",
        "step-00000002",
    ]


def test_the_newest_good_one_of_all_places_is_used(tmp_path: Path) -> None:
    places = [FolderPlace(name, tmp_path / name) for name in ("near", "far")]
    near, far = (Run(tmp_path / "run", place, keep=3) for place in places)
    near.save(1)
    far.save(2)
    near.save(3)
    (tmp_path / "near" / "step-00000003" / "shard.0.safetensors").write_bytes(b"x")
    shutil.rmtree(tmp_path / "run")
    notes: list[str] = []
    restore(tmp_path / "run", places, notes.append)
    assert load(tmp_path / "run" / "checkpoints").step == 2
    assert notes == [
        "step-00000003 is taken from near",
        "checkpoint not used: near: step-00000003: shard.0.safetensors is not what was written",
        "step-00000002 is taken from far",
    ]


def test_a_run_is_not_restarted_if_its_places_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    notes: list[str] = []
    with pytest.raises(CheckpointError, match="no checkpoint is good:\nslow cannot be listed: Not a directory"):
        restore(tmp_path / "run", [FolderPlace("slow", tmp_path / "slow")], notes.append)
    run = Run(tmp_path / "run", FolderPlace("other", tmp_path / "other"))
    run.save(1)
    assert restore(tmp_path / "run", [FolderPlace("slow", tmp_path / "slow")], notes.append) is None


@pytest.mark.parametrize("number", range(0, 24, 3))
def test_a_kill_while_a_checkpoint_is_fetched_loses_nothing(
    tmp_path: Path, faulty: Callable[[Calls], Calls], number: int
) -> None:
    place = FolderPlace("slow", tmp_path / "slow")
    run = Run(tmp_path / "run", place, keep=2)
    for step in (1, 2):
        run.save(step)
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "shard.0.safetensors").write_bytes(b"x")
    faulty(Calls(kill_at(number)))
    try:
        restore(tmp_path / "run", [place], print)
    except Killed:
        faulty(Calls())
        restore(tmp_path / "run", [place], print)
    assert load(tmp_path / "run" / "checkpoints").step == 2


def test_a_copy_is_on_the_disk_before_the_next_file(tmp_path: Path, faulty: Callable[[Calls], Calls]) -> None:
    """Its name is synced in its folder, and that one's in the place."""
    calls: list[str] = []
    faulty(Calls(lambda number, name: calls.append(name)))
    FolderPlace("slow", tmp_path / "slow").write("step-00000001", "one", [b"1"])
    assert calls == ["mkdir", "open", "write", "fsync", "rename", "fsync", "fsync"]


def test_a_part_that_a_kill_left_is_written_anew(tmp_path: Path) -> None:
    place = FolderPlace("slow", tmp_path / "slow")
    assert place.names() == []
    place.write("step-00000001", "one", [b"begin, ", memoryview(b"end")])
    (tmp_path / "slow" / "step-00000001" / ".part-two").write_bytes(b"more than all of it")
    place.write("step-00000001", "two", [b"two"])
    (tmp_path / "slow" / "another").mkdir()
    assert place.names() == ["step-00000001"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "slow" / "step-00000001").iterdir()}
    assert files == {"one": b"begin, end", "two": b"two"}
    assert b"".join(place.read("step-00000001", "one")) == b"begin, end"


# ---------------------------------------------------------------- which places


def test_places_that_lead_into_the_run_or_into_each_other_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run / "inside")
    (tmp_path / "twin").symlink_to(tmp_path / "slow")
    for texts, words in [
        (("run/inside",), "leads into the folder of the run"),
        (("link",), "leads into the folder of the run"),
        ((f"file://{run}/x",), "leads into the folder of the run"),
        ((f"local://{tmp_path}/link/x",), "leads into the folder of the run"),
        (("slow", "twin"), "names twin, which leads into slow"),
        (("slow/deep", "slow"), "names slow, which leads into slow/deep"),
        (("nosuch://x/y",), "checkpoints go to nosuch://x/y: Protocol not known: nosuch"),
    ]:
        with pytest.raises(PlaceError, match=words):
            places_of(("local", *texts), tmp_path, run)
    places = places_of(("local", "slow", f"file://{tmp_path}/other", "memory://b/x"), tmp_path, run)
    assert [type(place) for place in places] == [FolderPlace, FolderPlace, StorePlace]


def test_a_store_without_its_package_reports_what_to_install() -> None:
    with pytest.raises(PlaceError) as raised:
        StorePlace("s3://bucket/mine")
    assert str(raised.value) == (
        "checkpoints go to s3://bucket/mine, which needs s3fs: pip install it, or dsc with its extra: "
        "pip install 'dsc-trainer[s3]'"
    )


def test_no_link_below_a_place_is_followed(tmp_path: Path) -> None:
    place = FolderPlace("slow", tmp_path / "slow")
    run = Run(tmp_path / "run", place)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (copied,) = run.save(1)
    assert copied.reason and not [*(tmp_path / "elsewhere").iterdir()]


def test_the_folder_above_a_place_must_be_there(tmp_path: Path) -> None:
    """A store that is not mounted is not made on the disk of the machine."""
    (copied,) = Run(tmp_path / "run", FolderPlace("mnt/slow", tmp_path / "mnt" / "slow")).save(1)
    assert copied.reason == "mnt/slow: No such file or directory" and not (tmp_path / "mnt").exists()
