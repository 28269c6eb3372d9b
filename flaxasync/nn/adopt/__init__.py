"""Turns plain models into parallel ones: replaces their layers, and puts arrays under the shardings of the layers.

```
parallelize   replaces the layers of a model, by the paths of its modules
replacement   the parallel form of one plain layer
loading       puts plain arrays into a model of parallel layers
lora          the parallel form of `nnx.LoRA`
```
"""
