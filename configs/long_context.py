"""A small byte-level decoder for sequences of 8192 bytes, each of which is split over four
simulated CPU devices.
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


def long_context() -> Config:
    """Trains with ring attention over 4 devices and tensor parallelism over 2; small enough for two
    CPU cores.
    """
    return Config(
        workdir="runs/long_context",
        steps=100,
        mesh=MeshConfig(data=1, context=4, model=2, platform="cpu", cpu_devices=8),
        model=TransformerConfig(
            vocab_size=256,
            layers=1,
            width=32,
            heads=2,
            kv_heads=2,
            mlp_width=96,
            rope_theta=500_000.0,
        ),
        data=DataConfig(sequence_length=8192, batch_size=1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        checkpoint=CheckpointConfig(every=25),
        eval=EvalConfig(every=50, batches=1),
        report=ReportConfig(every=5),
    )
