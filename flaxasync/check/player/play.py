"""`play` and `play_dump`: a function, or a folder of dumps, to a played result."""

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flaxasync.check.player.chip_grid import place_devices
from flaxasync.check.player.chip_grid import topology as read_topology
from flaxasync.check.player.chips import PlayedChip, played_chip
from flaxasync.check.player.dump import Note, read_dump, write_note
from flaxasync.check.player.errors import MeshMismatchError
from flaxasync.check.player.result import Result, make_result
from flaxasync.check.player.simulation import Mesh


def play(
    fn: Callable,
    *args: Any,
    topology: str,
    keep_dumps: str | os.PathLike | None = None,
    measured: float | None = None,
    accept: Iterable[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Result:
    """Compiles a function for a topology in a child process, dumps its bundles, and plays them.

    Args:
      fn: a jitted function, or a function of global arrays, as for `compile_for`.
      *args: arrays or jax.ShapeDtypeStruct with shardings on a `topology_mesh`.
      topology: "v5e:2x4", ...
      keep_dumps: an empty folder to leave the dumps in.
      measured: seconds that the same program took on a TPU, where known: the result then states its error.
      accept: names of operations that the player does not know and that are to cost their slot only.
      compiler_options: libtpu's own options.

    Returns:
      The result.

    Raises:
      ValueError: the topology is unknown or does not fit.
      RuntimeError: the compiler refused the program.
      PlayerError: the program cannot be played, or breaks a rule of the machine.
    """
    from flaxasync.check.compile.compile_for import compile_for  # imports jax

    with tempfile.TemporaryDirectory(prefix="flaxasync-") as temporary:
        folder = pathlib.Path(temporary if keep_dumps is None else keep_dumps)
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"keep_dumps must be an empty folder: {folder} is not; dumps of two programs cannot be told apart"
            )
        compiled = compile_for(topology, fn, *args, keep_dumps=folder, compiler_options=compiler_options)
        write_note(folder, Note(topology, _libtpu_version(), compiled.coords))
        return play_dump(folder, measured=measured, accept=accept)


def play_dump(
    folder: str | os.PathLike,
    *,
    topology: str | None = None,
    coords: Iterable[tuple[int, ...]] | None = None,
    chip: PlayedChip | None = None,
    measured: float | None = None,
    accept: Iterable[str] = (),
    any_version: bool = False,
) -> Result:
    """Plays a folder of bundle dumps.

    Args:
      folder: where `--xla_jf_dump_to` pointed.
      topology: what the program was compiled for; that of the note that `play` leaves when None.
      coords: the chip of each partition, in the mesh's order; from the note, or in the chips' order, when None.
      chip: other constants than those of the table: `dataclasses.replace(played_chip("v5e"), hbm_efficiency=1.0)`.
      measured, accept: as for `play`.
      any_version: play dumps of an untested libtpu, too.

    Raises:
      PlayerError: see errors.py.
    """
    dump = read_dump(pathlib.Path(folder), any_version=any_version)
    named = topology or dump.note.topology
    if not named:
        raise MeshMismatchError(
            f"{folder} does not say which topology it was compiled for: name it, topology='v5e:2x2' for example"
        )
    if topology and dump.note.topology and topology != dump.note.topology:
        raise MeshMismatchError(
            f"{folder} was compiled for {dump.note.topology}, not for {topology}: compile again, or leave it out"
        )
    grid = read_topology(named)
    chip = chip or played_chip(named)
    order = tuple(tuple(c) for c in coords) if coords is not None else dump.note.coords
    notes = []
    if not order and dump.devices > 1:
        notes.append("the order of the mesh is not known: partitions are taken to be the chips in their order")
    if not dump.note.libtpu:
        notes.append("the dump does not say which libtpu made it; its form is that of a tested version")
    mesh = Mesh(dump, grid, place_devices(grid, dump.devices, order), chip, frozenset(accept))
    mesh.run()
    return make_result(mesh, measured=measured, basis_notes=tuple(notes))


def _libtpu_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""
