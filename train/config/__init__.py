"""The configuration of a run and its command line."""

from train.config.fields import CheckpointConfig as CheckpointConfig
from train.config.fields import Config as Config
from train.config.fields import DataConfig as DataConfig
from train.config.fields import EvalConfig as EvalConfig
from train.config.fields import MeshConfig as MeshConfig
from train.config.fields import OptimizerConfig as OptimizerConfig
from train.config.fields import ProfileConfig as ProfileConfig
from train.config.fields import ReportConfig as ReportConfig
from train.config.fields import SkipConfig as SkipConfig
from train.config.fields import flatten as flatten
