"""A small byte-level decoder for eight simulated CPU devices, which two CPU cores train in
minutes.
"""

from models.config import TransformerConfig
from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ReportConfig,
)


def tiny() -> Config:
    """Trains on the Python standard library with tensor parallelism over 8 devices.

    Rings of eight are loops, as on TPUs. `--mesh.data 2 --mesh.model 4` trains faster on two cores,
    with the same losses up to rounding; rings of four are written out.
    """
    return Config(
        workdir="runs/tiny",
        steps=400,
        mesh=MeshConfig(data=1, model=8, platform="cpu", cpu_devices=8),
        model=TransformerConfig(
            vocab_size=256, layers=4, width=128, heads=8, kv_heads=4, mlp_width=384
        ),
        data=DataConfig(sequence_length=128, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100),
        eval=EvalConfig(every=100, batches=8),
        report=ReportConfig(every=10),
    )
