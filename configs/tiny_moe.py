"""A small byte-level mixture of experts for eight simulated CPU devices, which two CPU cores train
in minutes.
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


def tiny_moe() -> Config:
    """Trains on the Python standard library, with two of eight experts on each of 4 devices and 2
    ways of data.
    """
    return Config(
        workdir="runs/tiny_moe",
        steps=200,
        mesh=MeshConfig(data=2, model=4, platform="cpu", cpu_devices=8),
        model=TransformerConfig(
            vocab_size=256,
            layers=2,
            width=128,
            heads=8,
            kv_heads=4,
            mlp_width=192,
            experts=8,
            experts_per_token=2,
        ),
        data=DataConfig(sequence_length=128, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100),
        eval=EvalConfig(every=100, batches=8),
        report=ReportConfig(every=10),
    )
