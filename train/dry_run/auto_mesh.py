"""`--mesh auto`: the sizes of the mesh that are predicted to be the fastest on the chips of a run
or of a dry run.

A run chooses before it opens its chips, because flags of libtpu depend on the mesh: a child process
counts them. A run that continues on as many chips keeps its mesh, which its workdir has in
config.json.
"""

import contextlib
from pathlib import Path

from flaxasync.check import CHIPS
from flaxasync.ops.trust import Mode, trusting
from flaxasync.verify.child import Setup
from train.config import Config
from train.config.command import load_config
from train.dry_run.command import topology_devices
from train.dry_run.meshes import best_mesh, with_mesh
from train.dry_run.prediction import mesh_options
from train.lifecycle.errors import InputError
from train.metrics.output import print_line
from train.step.flags import may_have_tpus
from train.step.mesh import axis_sizes, infer_sizes
from train.step.verify import describe_machine, setup_of

_NAMED = "give --mesh.data, --mesh.fsdp, --mesh.context and --mesh.model"


def mesh_of_topology(config: Config, topology: str) -> Config:
    """Returns a configuration with the mesh that is predicted to be the fastest for a topology, and
    prints it.
    """
    if "*" in topology:
        raise InputError(
            "--mesh auto must have a topology of one slice, because it does not know the network "
            f"between slices: got --topology {topology}; {_NAMED}"
        )
    devices = len(topology_devices(topology))
    chip = topology.partition(":")[0]
    if chip not in CHIPS:
        raise InputError(
            f"--mesh auto predicts the times of TPUs alone: got --topology {topology}; {_NAMED}, "
            "with mesh.model within a host"
        )
    return best_mesh(config, CHIPS[chip], devices)


def mesh_of_run(config: Config, trust: Mode, *, setup: Setup | None = None) -> Config:
    """Returns a configuration with the mesh of its workdir, or else the fastest one for the TPUs of
    this machine.

    `setup` starts the child process that counts the chips.
    """
    recorded = _recorded(config)
    if config.mesh.distributed:
        if recorded is None:
            raise InputError(
                "--mesh auto counts the chips of one host, and mesh.distributed has several: "
                f"{_NAMED}, which --dry-run --topology v5e:8x8 --mesh auto prints for any topology"
            )
        return _continued(config, recorded)
    if not may_have_tpus(config):
        raise InputError(
            "--mesh auto predicts the times of TPUs alone, and this run has "
            f"mesh.platform={config.mesh.platform}: {_NAMED}"
        )
    machine = describe_machine(setup or setup_of(config))
    if machine["platform"] != "tpu" or machine["chip"] not in CHIPS:
        raise InputError(
            f"--mesh auto predicts the times of known TPUs alone, and here are {machine['kind']}: "
            f"{_NAMED}"
        )
    devices = machine["devices"]
    if recorded is not None:
        # where its mesh has other numbers of devices, one is chosen
        with contextlib.suppress(InputError):
            infer_sizes(recorded, devices)
            return _continued(config, recorded)
    with trusting(trust):
        return best_mesh(config, CHIPS[machine["chip"]], devices)


def _recorded(config: Config) -> dict[str, int] | None:
    """Returns the sizes of the mesh with which the workdir was last used; None if there was no run
    in it.
    """
    workdir = Path(config.workdir)
    if not (workdir / "config.json").is_file():
        return None
    return axis_sizes(load_config(workdir).mesh)


def _continued(config: Config, sizes: dict[str, int]) -> Config:
    named = mesh_options(sizes)
    print_line(f"mesh       {named} (auto: that of {config.workdir}, which this run continues)")
    return with_mesh(config, sizes)
