"""Declare the traits of local SGD and the keys that it adds to CONFIG. This module does not import
torch."""

from typing import Annotated

from pydantic import Field

from distributed_training.settings.keys import Options, config_key
from distributed_training.settings.strategies import Traits

TRAITS = Traits(build="local_sgd.py:LocalSGD", axes=("dp_replicate",))


class OPTIONS(Options):
    """CONFIG keys for local SGD and DiLoCo. The defaults select local SGD. For DiLoCo, set the
    outer learning rate to 0.7 and the outer momentum to 0.9."""

    local_steps: Annotated[int, Field(ge=1, le=2**20)] = config_key(8, work=True)
    """Number of local steps per replica between synchronizations."""
    outer_lr: Annotated[float, Field(ge=0.001, le=10)] = config_key(1.0, work=True)
    """Learning rate of the outer step toward the replicas' mean. 1 uses the mean itself."""
    outer_momentum: Annotated[float, Field(ge=0, le=0.999)] = config_key(0.0, work=True)
    """Nesterov momentum of the outer step. DiLoCo uses 0.9 with outer_lr 0.7."""

    @property
    def averages(self) -> bool:
        """Return whether replicas continue from their mean, without an outer optimizer."""
        return self.outer_lr == 1 and self.outer_momentum == 0

    def steps_between_exchanges(self) -> int | None:
        return self.local_steps

    def bytes_per_parameter(self, num_replicas: int) -> float:
        """Return the number of bytes per parameter for the outer momentum and for the fp32 weights
        of the last synchronization."""
        if self.averages:
            return 0
        return 8 if self.outer_momentum else 4
