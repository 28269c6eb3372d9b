"""The rows of the fault table about files of the workdir. test_table.py says what a row shows."""

import json
import re
import shutil

from tests.train.lifecycle.conftest import after_step, error_of, fault
from tests.train.runs import contents, events_of, lines_of


@fault(
    "a damaged array in the newest checkpoint",
    "a changed data position in the record of a checkpoint",
)
def test_damaged_checkpoint(stopped, expected):
    """The newest checkpoint is damaged in one way and then, with its arrays repaired, in the other
    way.
    """
    *_, earlier, newest = stopped.steps_saved()
    checkpoint = stopped.work / "checkpoints" / str(newest)
    arrays = {file: file.read_bytes() for file in (checkpoint / "state").rglob("d/*")}
    (record,) = (checkpoint / "record").rglob("metadata")
    fields = json.loads(record.read_text())
    fields["data"]["sequences"] += 8
    for damage, says in (
        (
            {file: content[:20] for file, content in arrays.items()},
            f"Run again with --resume {earlier}",
        ),
        (arrays | {record: json.dumps(fields).encode()}, "the record is not what was saved"),
    ):
        for file, content in damage.items():
            file.write_bytes(content)
        before = contents(stopped.work)
        stopped.fails(2, says)
        assert contents(stopped.work) == before
    stopped.goes_on(expected, "--resume", earlier)


@fault("a checkpoint whose folder was renamed, copied or linked")
def test_renamed_checkpoint(stopped, expected):
    folder = stopped.work / "checkpoints"
    newest = max(stopped.steps_saved())
    wrong = folder / "35"
    (folder / str(newest)).rename(wrong)
    before = contents(stopped.work)
    stopped.fails(2, f"the checkpoint of step 35, {wrong}, holds step {newest}")
    assert contents(stopped.work) == before
    wrong.rename(folder / str(newest))
    wrong.symlink_to(str(newest))
    stopped.fails(2, f"holds step {newest}")
    wrong.unlink()
    stopped.goes_on(expected)


@fault("an invalid line in metrics.jsonl")
def test_bad_line(stopped, expected):
    path = stopped.work / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\xff\0garbage\n", *lines[5:]]))
    err = stopped.completes()
    assert re.fullmatch(
        r"warning: .* had 1 invalid lines, which were moved to .*metrics.invalid.jsonl; .*\n", err
    ), err
    assert stopped.losses() == expected


@fault("a deleted metrics.jsonl")
def test_deleted_metrics(stopped, expected):
    (stopped.work / "metrics.jsonl").unlink()
    newest = max(stopped.steps_saved())
    err = stopped.completes()
    assert (
        f"lacks {newest} of the {newest} steps that were done before; they may still be in "
        "tensorboard/" in err
    )
    assert [line["loss"] for line in lines_of(stopped.work)] == expected[newest:]


@fault("an incomplete last line of metrics.jsonl or events.jsonl")
def test_cut_line(stopped, expected):
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(stopped.work / name, "a") as file:
            file.write('{"step": 17, "lo')
    stopped.goes_on(expected)
    assert [event["event"] for event in events_of(stopped.work)].count("start") == 2


@fault("a deleted config.json, and another seed")
def test_deleted_config(stopped, refused, expected):
    (stopped.work / "config.json").unlink()
    refused("seed was 0 and is 1", "--seed", 1)
    stopped.goes_on(expected)


@fault("deleted events, plots, event files and program")
def test_deleted_views(stopped, expected):
    shutil.rmtree(stopped.work / "tensorboard")
    names = ("events.jsonl", "loss.png", "program.txt.gz")
    for name in names:
        (stopped.work / name).unlink()
    stopped.goes_on(expected)
    assert all((stopped.work / name).stat().st_size for name in names)
    assert list((stopped.work / "tensorboard").glob("events*"))


@fault("a damaged cache of compiled programs")
def test_damaged_cache(place, expected, tmp_path):
    cache = tmp_path / "programs"
    process = place.start("--compile_cache", cache, JAX_COMPILATION_CACHE_DIR="")
    after_step(process, 6)
    process.kill()
    process.communicate()
    entries = list(cache.glob("*-cache"))
    assert entries
    for path in entries:
        path.write_bytes(b"")
    process = place.start("--compile_cache", cache, JAX_COMPILATION_CACHE_DIR="")
    error_of(process, 0)
    assert place.losses() == expected
