"""Compares the sizes that a config.json names with the tensors of the files, before anything of
that size is made.

A size that is far too large would otherwise be noticed only when memory runs out. That every tensor
has exactly its shape is compared later, in `models.hugging_face`. This file does not import JAX.
"""

import math
import re

from models.families import Family
from models.family_defaults import Fields
from models.foreign_folder import listed
from models.safetensors_files import TensorFiles

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
# The parameters of one of which each size is a dimension.
_TENSORS_OF = {
    "vocab_size": ("embed.embedding",),
    "width": ("embed.embedding",),
    "heads": ("layers.attention.query.kernel",),
    "head_dim": ("layers.attention.query.kernel",),
    "kv_heads": ("layers.attention.key.kernel",),
    "mlp_width": ("layers.mlp.gate.kernel", "layers.mlp.gate"),
    "expert_width": ("layers.mlp.gate",),
    "experts": ("layers.mlp.router.kernel",),
}


def check_sizes(files: TensorFiles, family: Family, fields: Fields) -> None:
    """Raises ValueError if config.json names sizes that no tensor of the files can have.

    Args:
      files: The tensors.
      family: The family.
      fields: The fields of `TransformerConfig` that config.json determines.
    """
    layers = {found[1] for found in map(_LAYER.match, files.shapes) if found}
    problems = []
    for name, key in family.fields.items():
        size = fields[name]
        if name == "layers":
            most = len(layers)
            what = "the number of layers in the files"
        elif name in _TENSORS_OF:
            tensor = _tensor_of(name, files, family)
            shapes = list(files.shapes.values())
            if tensor:
                shapes = [files.shapes[tensor]]
            most = sum(map(math.prod, shapes))
            what = f"the number of values of {tensor or 'all tensors'}"
        else:
            continue
        if size is not None and size > most:
            origin = ""
            if family.defaults.get(key) == size:
                origin = ", the default where config.json lacks it,"
            problems.append(f"{key} is {size:,}{origin} and must be at most {most:,}, {what}")
    if problems:
        raise ValueError(
            f"config.json and the tensors of {files.path} are not of one model: {listed(problems)}"
        )


def _tensor_of(name: str, files: TensorFiles, family: Family) -> str | None:
    """Returns a tensor in the files of which a field is a dimension, if there is one."""
    for parameter in _TENSORS_OF[name]:
        tensor = family.tensors.get(parameter, "").format(layer=0, expert=0)
        if tensor in files.shapes:
            return tensor
    return None
