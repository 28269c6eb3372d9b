"""Which devices a program is for: those of the ambient mesh, whether or not they are present."""

import jax


def platform() -> str | None:
    """What the enclosing mesh is made of, "tpu" say; None where it does not tell.

    A mesh over the devices of a topology tells "tpu" with no TPU present, and so does the abstract mesh of a simulator.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else None


def check_tpu(caller: str, instead: str) -> None:
    """Raises NotImplementedError where the enclosing mesh is known to be of other devices than TPUs."""
    found = platform()
    if found not in ("tpu", None):
        raise NotImplementedError(
            f"{caller} is made of TPU kernels, and this mesh is of {found} devices; use {instead}"
        )
