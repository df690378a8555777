"""Declare the traits, keys and costs of data parallelism with compressed gradients. This module
does not import torch."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import Options, config_key
from distributed_training.settings.strategies import Traits

TRAITS = Traits(build="compressed.py:Compressed", axes=("dp_replicate",), builds_on_device=True)


class OPTIONS(Options):
    """CONFIG keys for gradient compression. The default is PowerSGD with rank 4."""

    compression: Literal["powersgd", "topk-int8"] = config_key("powersgd", work=True)
    """Method that compresses gradients before they are averaged."""
    compression_rank: Annotated[int, Field(ge=1, le=2**31)] = config_key(4, work=True)
    """With powersgd: rank of the approximation of each gradient matrix."""
    compression_k: Annotated[float, Field(ge=1e-6, le=1)] = config_key(0.01, work=True)
    """With topk-int8: fraction of the values that are sent exactly. The other values are sent in
    8 bits."""

    def num_exact(self, num_values: int) -> int:
        """Return how many of `num_values` values topk-int8 sends exactly."""
        return max(1, round(self.compression_k * num_values))

    def check(self, precision: str, hidden_size: int) -> None:
        if precision == "fp16":
            what = "strategy='compressed' does not work with precision='fp16'"
            why = (
                "an overflow would remain in the compression error that is added to later gradients"
            )
            raise UserError(what, why, "set precision to bf16")
        if self.compression == "powersgd" and self.compression_rank > hidden_size:
            what = f"compression_rank={self.compression_rank} is too large for this model"
            why = f"the matrices of this model have {hidden_size} rows or columns"
            raise UserError(what, why, f"set compression_rank to {min(32, hidden_size)} or less")

    def idle(self) -> dict[str, str]:
        unused = "compression_k" if self.compression == "powersgd" else "compression_rank"
        return {unused: f"compression={self.compression!r} does not use this key"}

    def bytes_per_parameter(self, num_replicas: int) -> float:
        """Return the number of bytes per parameter for the errors that are added to later
        gradients. With topk-int8, each replica also stores the errors of the shard that it
        averages."""
        return 4 if self.compression == "powersgd" else 4 + 4 / num_replicas

    def sent_bytes(
        self, num_values: int, matrices: Sequence[tuple[int, int]], num_replicas: int
    ) -> dict[str, int]:
        if self.compression == "topk-int8" and self.compression_k < 1:
            part_size = -(-num_values // num_replicas)
            message = num_replicas * (8 * self.num_exact(part_size) + 4 + part_size)
            return {"all_to_all": message, "all_gather": message}
        num_bytes = 4 * num_values
        if self.compression == "powersgd":
            for rows, columns in matrices:
                factors = (rows + columns) * min(rows, columns, self.compression_rank)
                if 2 * factors < rows * columns:  # otherwise torch sends the matrix
                    num_bytes -= 4 * (rows * columns - factors)
        return {"all_reduce": num_bytes}
