"""Declare the traits of DeepSpeed's pipeline engine. This module does not import torch."""

from dataclasses import replace

from distributed_training.settings.strategies import ENGINES

TRAITS = replace(
    ENGINES["deepspeed"], build="pipeline.py:DeepSpeedPipelineEngine", axes=("pp", "dp_shard")
)
