"""The former home of ring attention, which says where it is now.

It cannot forward: importing this module sets the attribute `flaxasync.ring_attention`, which is the
  function.
"""

raise ImportError(
    "flaxasync.ring_attention is no longer a module: use the function flaxasync.ring_attention, or "
    "import from "
    "flaxasync.ops.attention.api"
)
