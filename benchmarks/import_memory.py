"""The host memory that an import needs beyond what the devices hold: `python benchmarks/import_memory.py`.

A file of 2 GB, of a Llama with a billion parameters, is imported onto 8 simulated CPU devices, whose memory is host
memory too. The command prints the peak of the process less what it had before and less the parameters.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from benchmarks.programs import array
from models import safetensors_files
from models.config import TransformerConfig
from models.families import write_config
from models.hugging_face import import_parameters, load_config
from models.transformer import Transformer

CONFIG = TransformerConfig(
    vocab_size=32_000, layers=20, width=2048, heads=32, kv_heads=4, mlp_width=5632, dtype="bfloat16",
    param_dtype="bfloat16",
)  # fmt: skip


def write_checkpoint(folder: Path, abstract: Any) -> int:
    """Writes a checkpoint of zeros, one tensor at a time, and returns its bytes."""
    family, config = write_config(CONFIG, length=2048)
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree.flatten_with_path(abstract)[0]:
        template = family.tensors[".".join(key.key for key in path)]
        stacked = "{layer}" in template
        shape = leaf.shape[1:] if stacked else leaf.shape
        for layer in range(leaf.shape[0] if stacked else 1):
            shapes[template.format(layer=layer)] = shape[::-1] if path[-1].key == "kernel" else shape
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    tensors = ((name, np.zeros(shape, ml_dtypes.bfloat16)) for name, shape in shapes.items())
    safetensors_files.write(folder, tensors, sizes, shard_bytes=10**10)
    return sum(sizes.values())


def status(name: str) -> int:
    """Returns a figure of /proc/self/status in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as name:
        state = nnx.to_pure_dict(jax.jit(lambda: nnx.state(Transformer(CONFIG, rngs=nnx.Rngs(0)))).eval_shape())
        abstract = jax.tree.map(lambda leaf: array(leaf.shape, mesh, leaf.sharding.spec, leaf.dtype), state)
        size = write_checkpoint(Path(name), abstract)
        family, _ = load_config(Path(name))
        before, start = status("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        params = jax.block_until_ready(import_parameters(Path(name), family, abstract, lambda *_: None))
        seconds, peak = time.perf_counter() - start, status("VmHWM")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    beyond = peak - before - held
    print(f"{size / 1e9:.2f} GB in {seconds:.0f} s: the peak was {beyond / 1e6:.0f} MB beyond the {held / 1e9:.2f} GB")


if __name__ == "__main__":
    # By default the allocator keeps freed memory for later use, most of it that of simulated devices: 400 MB here.
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"})
    main()
