"""The rows of the fault table about files of the workdir. test_table.py says what a row shows."""

import json
import re
import shutil

from tests.train.launcher import contents, events_of, lines_of
from tests.train.lifecycle.faults.workplace import after_step, fault, one_paragraph


@fault("a damaged array in the newest checkpoint")
def test_damaged_checkpoint(stopped, expected):
    *_, earlier, newest = stopped.steps_saved()
    for file in (stopped.work / "checkpoints" / str(newest) / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:20])
    before = contents(stopped.work)
    code, _, err = stopped.run()
    assert code == 2
    assert one_paragraph(err)
    assert f"run again with --resume {earlier}" in err
    assert contents(stopped.work) == before
    assert stopped.completes("--resume", earlier) == ""
    assert stopped.losses() == expected


@fault("a changed data position in the record of a checkpoint")
def test_damaged_record(stopped, expected):
    *_, earlier, newest = stopped.steps_saved()
    (path,) = (stopped.work / "checkpoints" / str(newest) / "record").rglob("metadata")
    record = json.loads(path.read_text())
    record["data"]["sequences"] += 8
    path.write_text(json.dumps(record))
    code, _, err = stopped.run()
    assert code == 2
    assert one_paragraph(err)
    assert "the record is not what was saved" in err
    assert stopped.completes("--resume", earlier) == ""
    assert stopped.losses() == expected


@fault("an invalid line in metrics.jsonl")
def test_bad_line(stopped, expected):
    path = stopped.work / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\xff\0garbage\n", *lines[5:]]))
    err = stopped.completes()
    assert re.fullmatch(r"warning: .* had 1 invalid lines, which were moved to .*metrics.invalid.jsonl; .*\n", err), err
    assert stopped.losses() == expected


@fault("a deleted metrics.jsonl")
def test_deleted_metrics(stopped, expected):
    (stopped.work / "metrics.jsonl").unlink()
    newest = max(stopped.steps_saved())
    err = stopped.completes()
    assert f"lacks {newest} of the {newest} steps that were done before; they may still be in tensorboard/" in err
    assert [line["loss"] for line in lines_of(stopped.work)] == expected[newest:]


@fault("an incomplete last line of metrics.jsonl or events.jsonl")
def test_cut_line(stopped, expected):
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(stopped.work / name, "a") as file:
            file.write('{"step": 17, "lo')
    stopped.completes()
    assert stopped.losses() == expected
    events = [event["event"] for event in events_of(stopped.work)]
    assert events.count("start") == 2


@fault("a deleted config.json, and another seed")
def test_deleted_config(stopped, expected):
    (stopped.work / "config.json").unlink()
    code, _, err = stopped.run("--seed", 1)
    assert code == 2
    assert one_paragraph(err)
    assert "seed was 0 and is 1" in err
    assert stopped.completes() == ""
    assert stopped.losses() == expected


@fault("deleted events, plots, event files and program")
def test_deleted_views(stopped, expected):
    shutil.rmtree(stopped.work / "tensorboard")
    names = ("events.jsonl", "loss.png", "program.txt.gz")
    for name in names:
        (stopped.work / name).unlink()
    assert stopped.completes() == ""
    assert stopped.losses() == expected
    assert all((stopped.work / name).stat().st_size for name in names)
    assert list((stopped.work / "tensorboard").glob("events*"))


@fault("a damaged cache of compiled programs")
def test_damaged_cache(place, expected, tmp_path):
    cache = tmp_path / "programs"
    environment = {name: value for name, value in place._environment.items() if "COMPILATION_CACHE" not in name}
    place._environment = environment
    process = place.start("--compile_cache", cache)
    after_step(process, 6)
    process.kill()
    process.communicate()
    entries = [path for path in cache.iterdir() if path.name.endswith("-cache")]
    assert entries
    for path in entries:
        path.write_bytes(b"")
    err = place.completes("--compile_cache", cache)
    assert "Traceback" not in err
    assert place.losses() == expected
