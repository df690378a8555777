"""The stages of a pipeline, and the words for a mesh. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The stages of a pipeline; one stage with all blocks where there is none."""

    blocks_per_stage: tuple[int, ...]  # blocks of each stage, in the model's order
    ranks: tuple[int, ...]  # place along pp that holds each stage

    @property
    def stages(self) -> tuple[range, ...]:
        """Numbers of the blocks of each stage."""
        ends = itertools.accumulate(self.blocks_per_stage, initial=0)
        return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def show_axes(axes: Mapping[str, int]) -> str:
    """ "dp_shard 2 x tp 2"; axes of size 1 are left out unless all are."""
    shown = {axis: size for axis, size in axes.items() if size != 1}
    return " x ".join(f"{axis} {size}" for axis, size in (shown or dict(axes)).items())
