"""Dumps that cannot be simulated: incomplete, of another version, of another mesh, or with an unknown operation."""

import atexit
import functools
import json
import pathlib
import shutil
import tempfile

import pytest

from flaxasync.check import topology_mesh
from flaxasync.check.player import DumpError, MeshMismatchError, UnknownOperationError, play, play_dump
from flaxasync.check.player.__main__ import main
from tests.check.player.kernels import exchange_program


@functools.cache
def dumps():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="flaxasync-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fn, x = exchange_program(topology_mesh("v5e:2x2", (4,), ("ring",)))
    play(fn, x, topology="v5e:2x2", keep_dumps=folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    """A copy of correct dumps, for a test to damage."""
    return pathlib.Path(shutil.copytree(dumps(), tmp_path / "dumps"))


def file(folder, name):
    return next(path for path in sorted(folder.iterdir()) if path.name.split("-", 1)[1] == name)


def test_a_kernel_that_was_cut_short(copy):
    path = file(copy, "exchange.1-02-final_bundles.txt")
    text = path.read_text()
    path.write_text(text[: text.rindex("\n   0x")])
    with pytest.raises(DumpError, match=r"exchange.1-02-final_bundles.txt was cut short"):
        play_dump(copy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exchange.1-02-final_bundles.txt", r"no bundles for exchange.1"),
        ("exchange.1-00-original.txt", r"no \*-original.txt beside it"),
        ("TLP-hlo.txt", r"lacks \*-TLP-hlo.txt"),
        ("TLP-02-final_bundles.txt", "final bundles of 0 programs"),
    ],
)
def test_a_file_that_is_missing(copy, name, message):
    file(copy, name).unlink()
    with pytest.raises(DumpError, match=message):
        play_dump(copy)


def test_no_dump(tmp_path):
    with pytest.raises(DumpError, match="is no folder"):
        play_dump(tmp_path / "nowhere")
    with pytest.raises(DumpError, match="final bundles of 0 programs"):
        play_dump(tmp_path)


def test_two_programs_in_one_folder(copy):
    path = file(copy, "TLP-02-final_bundles.txt")
    shutil.copy(path, path.with_name("1-TLP-02-final_bundles.txt"))
    with pytest.raises(DumpError, match="final bundles of 2 programs"):
        play_dump(copy)
    fn, x = exchange_program(topology_mesh("v5e:2x2", (4,), ("ring",)))
    with pytest.raises(ValueError, match="must be an empty folder"):
        play(fn, x, topology="v5e:2x2", keep_dumps=copy)


def test_another_version_is_noted(copy):
    note = json.loads((copy / "player.json").read_text())
    (copy / "player.json").write_text(json.dumps(note | {"libtpu": "0.0.99"}))
    assert "dumped by libtpu 0.0.99; the player was tested with 0.0.51, 0.0.52" in play_dump(copy).notes


def test_a_note_that_is_damaged_or_missing(copy):
    (copy / "player.json").write_text("{")
    with pytest.raises(DumpError, match="damaged"):
        play_dump(copy)
    (copy / "player.json").unlink()
    with pytest.raises(MeshMismatchError, match="does not say which topology"):
        play_dump(copy)
    with pytest.raises(MeshMismatchError, match="compiled for 4 devices, but v5e:2x4 has 8"):
        play_dump(copy, topology="v5e:2x4")
    result = play_dump(copy, topology="v5e:2x2", coords=[(0, 0), (1, 0), (1, 1), (0, 1)])
    assert any("which libtpu made it" in note for note in result.notes)


def test_another_topology(copy):
    with pytest.raises(MeshMismatchError, match="was compiled for v5e:2x2, not for v5e:2x4"):
        play_dump(copy, topology="v5e:2x4")


def test_an_unknown_operation_is_named_and_can_be_accepted(copy):
    path = file(copy, "exchange.1-02-final_bundles.txt")
    lines = path.read_text().splitlines(keepends=True)
    wait = next(n for n, line in enumerate(lines) if "vwait.ge" in line)
    lines[wait] = lines[wait].replace("{ ", "{ %1 = vquux.f32 %v1_v0  ;;  ", 1)
    path.write_text("".join(lines))
    with pytest.raises(UnknownOperationError, match=rf"exchange.1: vector operation 'vquux.f32' .*txt:{wait + 1} "):
        play_dump(copy)
    assert play_dump(copy, accept=["vquux.f32"]).seconds > 0
    path.write_text("".join(lines).replace("%1 = vquux.f32 %v1_v0", "%s9_s9 = squux.u32 4"))
    with pytest.raises(UnknownOperationError, match=r"scalar operation 'squux.u32'"):
        play_dump(copy)


def test_the_command(copy, tmp_path, capsys):
    files = {name: tmp_path / name for name in ("r.json", "t.json", "p.png")}
    arguments = ["--json", str(files["r.json"]), "--trace", str(files["t.json"]), "--picture", str(files["p.png"])]
    assert main([str(copy), *arguments, "--topology", "v5e:2x2", "--measured-ms", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert "exchange.1" in printed
    assert "measured 0.02 ms" in printed
    assert all(path.stat().st_size > 0 for path in files.values())
    assert main([str(copy), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "v5e:2x2"
    assert main([str(copy), "--topology", "v5e:4x4"]) == 1
    assert "MeshMismatchError: " in capsys.readouterr().err
