"""Which mesh, and what binds, from 8 to 512 chips? Steps of an 8B and a 70B decoder, predicted; some are compiled.

    python benchmarks/scaling.py                                    predicts all rows in about half a minute, no TPU
    python benchmarks/scaling.py --write docs/scaling.md            also puts the table between the markers there
    python benchmarks/scaling.py --compile llama_8b v5e:4x4 ...     compiles the best mesh of each PRESET TOPOLOGY pair
    python benchmarks/scaling.py --compile ... --results FILE       keeps compiled rows there, and repeats none of them
                                                                    that has the same configuration, JAX and libtpu

A step has one sequence for each chip. The mesh of a row is the best of all grids of data x fsdp x context x model by
`train.dry_run.mesh_costs`, whose predictions are made of the sizes of model and mesh alone. A compiled row has the
memory that libtpu counts for the same mesh and the time that `fa.check.timeline` estimates. Nothing has run on a TPU.
The compilation of a step takes minutes, so that `--write` without `--compile` replaces the predicted table only.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib

import jax

from benchmarks.table import print_table, write_between_markers
from flaxasync import check
from flaxasync.hardware import CHIPS
from train.config import Config
from train.config.command import load_preset
from train.dry_run.compare_meshes import COMPILED, Row, compiled_row, rank
from train.dry_run.mesh_costs import Prediction
from train.dry_run.report import gib, time_text

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
PRESETS = ("llama_8b", "llama_70b")
CHIP_COUNTS = {  # a slice of v5e or v6e has 256 chips at most
    "v5e": (8, 16, 64, 256),
    "v6e": (8, 16, 64, 256),
    "v5p": (8, 16, 64, 512),
}
SEQUENCE = {"v5e": 4096, "v6e": 4096, "v5p": 8192}
HEADER = ("model", "chips", "data x fsdp x context x model", "memory", "step", "tokens/s a chip", "MFU", "exposed",
          "what binds")  # fmt: skip


def run(preset: str, chip: str, chips: int) -> Config:
    """Returns a preset with one sequence for each chip."""
    config = load_preset(CONFIGS / f"{preset}.py")
    data = dataclasses.replace(config.data, batch_size=chips, sequence_length=SEQUENCE[chip], microbatches=1)
    return dataclasses.replace(config, data=data)


def predicted(preset: str, chip: str, chips: int) -> tuple[str, ...]:
    """Returns the row of the best mesh of so many chips."""
    best = rank(run(preset, chip, chips), CHIPS[chip], chips)[0]
    mesh = _mesh(best)
    if not best.fits:
        limit = f"memory: a {chip} has {gib(best.available)}"
        return (preset, f"{chips} {chip}", mesh, gib(best.needed), "-", "-", "-", "-", limit)
    speed = SEQUENCE[chip] / best.seconds
    return (
        preset, f"{chips} {chip}", mesh, gib(best.needed), time_text(best.seconds), f"{speed:,.0f}", f"{best.mfu:.1%}",
        f"{best.exposed / best.seconds:.1%}", best.binds,
    )  # fmt: skip


def compiled(preset: str, topology: str, results: pathlib.Path | None) -> list[tuple[str, ...]]:
    """Returns the predicted row of the best mesh of a topology, and its compiled row, kept in a file or made now."""
    chip, chips = topology.partition(":")[0], check.topology_size(topology)
    config = run(preset, chip, chips)
    best = rank(config, CHIPS[chip], chips)[0]
    key = f"{preset} {topology} {_mesh(best)} {fingerprint(config)}"
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    if fields := dict(json.loads(line) for line in lines).get(key):
        row = Row(**fields)
    else:
        row = compiled_row(config, topology, best, "predicted")
        if results is not None and row.source == COMPILED:  # a crash or a time limit may not repeat itself
            results.write_text("".join(f"{line}\n" for line in [*lines, json.dumps([key, dataclasses.asdict(row)])]))
    speed = "-" if row.seconds is None else f"{SEQUENCE[chip] / row.seconds:,.0f}"
    memory, step, mfu, exposed, by_what, source = row.cells()[5:]
    before = predicted(preset, chip, chips)
    return [
        (preset, topology, *before[2:], "predicted"),
        (preset, topology, _mesh(best), memory, step, speed, mfu, exposed, by_what, source),
    ]


def fingerprint(config: Config) -> str:
    """Returns a digest of what decides a compiled row beside its mesh: configuration, compiler, and its figures."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    figures = [field.name for field in dataclasses.fields(Row)]
    return hashlib.sha256(
        json.dumps([dataclasses.asdict(config), versions, figures], sort_keys=True).encode()
    ).hexdigest()[:16]


def _mesh(prediction: Prediction) -> str:
    return "x".join(str(prediction.mesh.get(axis, 1)) for axis in ("data", "fsdp", "context", "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="file in which the table between the markers is replaced")
    parser.add_argument(
        "--compile", nargs="+", metavar="PRESET TOPOLOGY", help="pairs to compile, instead of predictions"
    )
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="file that keeps compiled rows")
    chosen = parser.parse_args()
    if len(chosen.compile or ()) % 2:
        parser.error(f"--compile needs pairs of a preset and a topology: got {len(chosen.compile)} arguments")
    if chosen.compile:
        jax.config.update("jax_platforms", "cpu")
        pairs = zip(chosen.compile[::2], chosen.compile[1::2], strict=True)
        rows = [row for preset, topology in pairs for row in compiled(preset, topology, chosen.results)]
    else:
        rows = [predicted(preset, chip, n) for preset in PRESETS for chip in CHIP_COUNTS for n in CHIP_COUNTS[chip]]
    text = print_table((*HEADER, "figures are") if chosen.compile else HEADER, rows)
    if chosen.write:
        write_between_markers(chosen.write, "compiled" if chosen.compile else "predicted", text)


if __name__ == "__main__":
    main()
