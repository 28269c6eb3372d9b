"""Draws docs/img/player_study.png: the fused and the overlapped kernel of the 2x2 study, simulated, below one another.

python docs/player_picture.py
"""

import pathlib

from benchmarks.player import DRAWN, TITLES, TOPOLOGY
from benchmarks.player_kernels import program
from flaxasync.check import save_picture, topology_mesh
from flaxasync.check.player import play


def main() -> None:
    """Simulates both kernels at the size of the study, which takes about twenty seconds, and draws them."""
    mesh = topology_mesh(TOPOLOGY, (2, 2), ("x", "y"))
    results = []
    for variant in DRAWN:
        fn, *arguments = program(variant, mesh)
        results.append(play(fn, *arguments, topology=TOPOLOGY))
    path = pathlib.Path(__file__).parent / "img" / "player_study.png"
    save_picture(results, path, titles=[TITLES[variant] for variant in DRAWN])


if __name__ == "__main__":
    main()
