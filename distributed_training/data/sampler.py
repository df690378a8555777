"""Which samples each optimizer step sees: a pure function of (seed, step). No torch import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distributed_training.data.samples import EMPTY, Samples, StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """The order of training samples, the same under every layout with this global batch.

    Every rank computes the whole order and takes its share. To save the number of steps done is to
    save the sampler.
    """

    num_samples: int
    global_batch_size: int  # sequences of one optimizer step, over all replicas
    micro_batch_size: int  # sequences in one forward pass of one replica
    num_microbatches: int  # of one replica in one optimizer step
    num_replicas: int
    replica: int  # of this rank; ranks of one tensor or pipeline group share one
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last step may be partly empty: every sample is seen once an epoch, none twice."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def step_indices(self, step: int) -> np.ndarray:
        """Samples of a step, EMPTY where an epoch's last step has none left: int64
        [num_microbatches, num_replicas, micro_batch_size], the same on every rank."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        first = position * self.global_batch_size
        chosen = _fill(order[first : first + self.global_batch_size], self.global_batch_size)
        return chosen.reshape(self.num_microbatches, self.num_replicas, self.micro_batch_size)

    def step_batch(self, samples: Samples, step: int) -> StepBatch:
        """This replica's micro-batches of optimizer step `step`."""
        indices = self.step_indices(step)
        own = [samples.batch(micro_batch) for micro_batch in indices[:, self.replica]]
        return StepBatch(own, samples.count_targets(indices))

    def is_full(self, step: int) -> bool:
        """Whether the step has a sample in every place of its batch."""
        position = step % self.steps_per_epoch
        return (position + 1) * self.global_batch_size <= self.num_samples

    def eval_indices(self, num_samples: int) -> Iterator[np.ndarray]:
        """This replica's micro-batches over `num_samples` samples, each once and in order: int64
        [micro_batch_size], padded with EMPTY so that every replica gets as many."""
        per_call = self.micro_batch_size * self.num_replicas
        for first in range(0, num_samples, per_call):
            chosen = _fill(np.arange(first, min(first + per_call, num_samples)), per_call)
            yield chosen.reshape(self.num_replicas, self.micro_batch_size)[self.replica]


def _fill(indices: np.ndarray, length: int) -> np.ndarray:
    """`indices` extended with EMPTY to `length`."""
    return np.pad(indices, (0, length - len(indices)), constant_values=EMPTY)
