"""The host memory that an import needs beyond what the devices hold: `python benchmarks/import_memory.py`.

A file of 2 GB, of a Llama with a billion parameters, is imported onto 8 simulated CPU devices, whose memory is host
memory too. So the table subtracts from the anonymous memory of the process what it had before, the
parameters that are done, and the one that is being stacked on the devices. Pages of the mapped file, which the kernel
can drop at any time, are listed apart.
"""

import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from models import safetensors_files
from models.config import TransformerConfig
from models.families import write_config
from models.hugging_face import import_parameters, load_config
from models.transformer import Transformer

CONFIG = TransformerConfig(
    vocab_size=32_000, layers=20, width=2048, heads=32, kv_heads=4, mlp_width=5632, dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: nnx.state(Transformer(CONFIG, rngs=nnx.Rngs(0)))).eval_shape()
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec)),
        nnx.to_pure_dict(state),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder, abstract)
        family, fields = load_config(folder)
        assert dataclasses.replace(TransformerConfig(**fields), head_dim=None, dtype="bfloat16",
                                   param_dtype="bfloat16") == dataclasses.replace(CONFIG)  # fmt: skip
        held = iter(np.cumsum([leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)]))
        watch = Watch(next(held))
        start = time.perf_counter()
        with watch:
            params = import_parameters(folder, family, abstract, lambda *_: watch.set_held(next(held, watch.held)))
        seconds = time.perf_counter() - start
        jax.block_until_ready(params)
    print("| file | devices hold | host memory beyond that, peak | mapped pages of the file, peak | time |")
    print("|---:|---:|---:|---:|---:|")
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"| {size / 1e9:.2f} GB | {total / 1e9:.2f} GB | {watch.peak / 1e6:.0f} MB | {watch.mapped / 1e6:.0f} MB "
        f"| {seconds:.0f} s |"
    )


class Watch:
    """Samples the memory of the process in a thread.

    Attributes:
      held: The bytes that the devices are expected to hold by now, the parameter in work included.
      peak: The most anonymous memory beyond that and beyond what there was before, in bytes.
      mapped: The most memory of mapped files beyond what there was before, in bytes.
    """

    def __init__(self, held: int):
        self.held, self.peak, self.mapped = held, 0, 0
        self._before, self._ended = memory(), threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def set_held(self, held: int) -> None:
        self.held = held

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            held = self.held
            anonymous, mapped = (now - before for now, before in zip(memory(), self._before, strict=True))
            self.peak, self.mapped = max(self.peak, anonymous - held), max(self.mapped, mapped)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def memory() -> tuple[int, int]:
    """Returns the anonymous memory of this process, and that of mapped files, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return anonymous, mapped


def write(folder: Path, abstract: object) -> int:
    """Writes a checkpoint of zeros, one tensor at a time, and returns its bytes."""
    family, config = write_config(CONFIG, length=2048)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {}
    for path, leaf in jax.tree.flatten_with_path(abstract)[0]:
        template = family.tensors[".".join(key.key for key in path)]
        stacked = "{layer}" in template
        shape = leaf.shape[1:] if stacked else leaf.shape
        for layer in range(leaf.shape[0] if stacked else 1):
            shapes[template.format(layer=layer)] = shape[::-1] if path[-1].key == "kernel" else shape
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    tensors = ((name, np.zeros(shape, ml_dtypes.bfloat16)) for name, shape in shapes.items())
    safetensors_files.write(folder, tensors, sizes, shard_bytes=10**10)
    assert jnp.bfloat16 == ml_dtypes.bfloat16
    return sum(sizes.values())


if __name__ == "__main__":
    # By default the allocator keeps freed memory for later use, most of it that of simulated devices: 400 MB here.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"})
    main()
