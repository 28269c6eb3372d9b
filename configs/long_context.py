"""A small byte-level decoder on sequences of 8192 bytes, each split over four simulated CPU devices."""

from models.transformer import TransformerConfig
from train.config import CheckpointConfig, Config, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, ReportConfig


def long_context() -> Config:
    """Ring attention over 4 devices, tensor-parallel over 2; narrow and shallow, so that two cores can train it."""
    return Config(
        workdir="runs/long_context",
        steps=100,
        mesh=MeshConfig(data=1, context=4, model=2, platform="cpu", cpu_devices=8),
        model=TransformerConfig(
            vocab_size=256, layers=1, width=32, heads=2, kv_heads=2, mlp_width=96, rope_theta=500_000.0
        ),
        data=DataConfig(sequence_length=8192, batch_size=1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        checkpoint=CheckpointConfig(every=25),
        eval=EvalConfig(every=50, batches=1, sample_tokens=0),
        report=ReportConfig(every=5),
    )
