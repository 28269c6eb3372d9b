"""Dumps that cannot be simulated: incomplete, of another version, of another mesh, or with an
unknown operation.
"""

import gc
import json
import pathlib
import re
import shutil
import sys

import pytest

from flaxasync.check.player import DumpError, MeshMismatchError, UnknownOperationError, play_dump
from flaxasync.check.player.__main__ import main
from flaxasync.check.player.dump import Dump
from flaxasync.check.tested_libtpu import untested
from tests.check.programs import play_exchange


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    play_exchange(keep_dumps=folder)
    return folder


@pytest.fixture
def copy(dumps, tmp_path):
    """A copy of correct dumps, for a test to damage."""
    return pathlib.Path(shutil.copytree(dumps, tmp_path / "dumps"))


def file(folder, name):
    return next(path for path in sorted(folder.iterdir()) if path.name.split("-", 1)[1] == name)


KERNEL, TOP = "exchange.1-02-final_bundles.txt", "TLP-02-final_bundles.txt"


def cut(path):
    path.write_text(path.read_text().rpartition("\n   0x")[0])


def double(path):
    shutil.copy(path, path.with_name(f"1-{TOP}"))


@pytest.mark.parametrize(("name", "damage", "message"), [
    (KERNEL, cut, r"exchange.1-02-final_bundles.txt was cut short"),
    (KERNEL, pathlib.Path.unlink, r"no bundles for exchange.1"),
    ("exchange.1-00-original.txt", pathlib.Path.unlink, r"no \*-original.txt beside it"),
    ("TLP-hlo.txt", pathlib.Path.unlink, r"lacks \*-TLP-hlo.txt"),
    ("TLP-hlo.txt", cut, r"TLP-hlo.txt cannot be read: .*the text is empty"),
    (TOP, pathlib.Path.unlink, "final bundles of 0 programs"),
    (TOP, double, "final bundles of 2 programs"),
])  # fmt: skip
def test_a_folder_that_does_not_hold_one_whole_program(copy, name, damage, message):
    damage(file(copy, name))
    with pytest.raises(DumpError, match=message):
        play_dump(copy)


def test_folders_without_a_dump_and_with_one_already(dumps, tmp_path):
    with pytest.raises(DumpError, match="is no folder"):
        play_dump(tmp_path / "nowhere")
    with pytest.raises(DumpError, match="final bundles of 0 programs"):
        play_dump(tmp_path)
    with pytest.raises(ValueError, match="must be an empty folder"):
        play_exchange(keep_dumps=dumps)


def test_notes_of_another_version_or_damaged_or_missing(copy):
    note = copy / "player.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"libtpu": "0.0.99"}))
    (said,) = [line for line in play_dump(copy).notes if "0.0.99" in line]
    assert said == untested("0.0.99")
    note.write_text("{")
    with pytest.raises(DumpError, match="damaged"):
        play_dump(copy)
    note.unlink()
    with pytest.raises(MeshMismatchError, match="does not say which topology"):
        play_dump(copy)
    with pytest.raises(MeshMismatchError, match="compiled for 4 devices, but v5e:2x4 has 8"):
        play_dump(copy, topology="v5e:2x4")
    result = play_dump(copy, topology="v5e:2x2", coords=[(0, 0), (1, 0), (1, 1), (0, 1)])
    assert any("libtpu whose version is not known" in note for note in result.notes)


def test_an_unknown_operation_is_named_and_can_be_accepted(copy, capsys):
    path = file(copy, KERNEL)
    lines = path.read_text().splitlines(keepends=True)
    wait = next(n for n, line in enumerate(lines) if "vwait.ge" in line)
    lines[wait] = lines[wait].replace("{ ", "{ %1 = vquux.f32 %v1_v0  ;;  ", 1)
    path.write_text("".join(lines))
    with pytest.raises(
        UnknownOperationError, match=rf"exchange.1: vector operation 'vquux.f32' .*txt:{wait + 1} "
    ):
        play_dump(copy)
    assert play_dump(copy, accept=["vquux.f32"]).seconds > 0
    path.write_text("".join(lines).replace("%1 = vquux.f32 %v1_v0", "%s9_s9 = squux.u32 4"))
    with pytest.raises(UnknownOperationError, match=r"scalar operation 'squux.u32'"):
        play_dump(copy)
    note = copy / "player.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"libtpu": "0.0.99"}))
    with pytest.raises(
        UnknownOperationError,
        match=r"'squux.u32'.*compiled by libtpu 0\.0\.99, which was not tested",
    ):
        play_dump(copy)
    assert main([str(copy)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("cannot be simulated: exchange.1: scalar operation 'squux.u32'")
    assert re.search(r"\.\nFrom its text alone, it is estimated at \d\.\d{3} ms, of which", printed)


def test_files_of_a_later_pass_with_three_digits_are_found(copy):
    for path in sorted(copy.iterdir()):
        path.rename(path.with_name(path.name.replace("-02-final_bundles", "-124-final_bundles")))
    assert play_dump(copy).seconds == play_dump(copy).seconds > 0
    (file(copy, "exchange.1-124-final_bundles.txt")).with_name(
        "9-schedule-analysis_final_bundles.txt"
    ).touch()
    assert play_dump(copy).seconds > 0


def test_the_command(dumps, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("r.json", "t.json", "p.png")}
    arguments = [
        "--json",
        str(files["r.json"]),
        "--trace",
        str(files["t.json"]),
        "--picture",
        str(files["p.png"]),
    ]
    assert main([str(dumps), *arguments, "--topology", "v5e:2x2"]) == 0
    printed = capsys.readouterr().out
    assert "exchange.1" in printed
    assert all(path.stat().st_size > 0 for path in files.values())
    assert main([str(dumps), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "v5e:2x2"
    assert main([str(dumps), "--topology", "v5e:2x4"]) == 2
    assert re.search(
        "MeshMismatchError: .* was compiled for v5e:2x2, not for v5e:2x4", capsys.readouterr().err
    )


def test_the_status_of_the_command_is_2_where_it_cannot_do_what_was_asked(
    dumps, tmp_path, capsys, monkeypatch
):
    """1 would mean that the program is wrong."""
    with pytest.raises(SystemExit, match="2"):
        main([str(dumps), "--coords", "a,b"])
    assert "--coords: invalid coordinates value: 'a,b'" in capsys.readouterr().err
    assert main([str(dumps), "--json", str(tmp_path / "nowhere" / "r.json")]) == 2
    assert capsys.readouterr().err.startswith("FileNotFoundError: ")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(dumps), "--picture", str(tmp_path / "p.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_a_dump_is_freed_after_its_simulation(dumps):
    def in_memory():
        gc.collect()
        return sum(type(found) is Dump for found in gc.get_objects())

    before = in_memory()
    assert play_dump(dumps).seconds > 0
    assert in_memory() == before
