"""Block sizes of the attention backends: a validated value, and the heuristic that fills in what is not given."""

import dataclasses

from dape_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile of logits that is held at once: ``rows`` batch rows x ``q`` queries x ``k`` keys, for all heads.

    ``backward``: another tile for the backward, where a backend can have two; None for the same one.
    """

    q: int
    k: int
    rows: int = 1
    backward: "BlockSizes | None" = None

    def __post_init__(self):
        for name in ("q", "k", "rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"block size {name}={value!r}: a positive integer is needed")
        if self.backward is not None and (not isinstance(self.backward, BlockSizes) or self.backward.backward):
            raise UserError(f"block size backward={self.backward!r}: a BlockSizes without another in it is needed")


def heuristic(batch: int, q_length: int, k_length: int, platform: str) -> BlockSizes:
    """Sizes for the blockwise backend.

    On CPU a tile of about 16,384 positions keeps the network's hidden layer in the second-level cache; elsewhere
    launches cost more than memory, so tiles are larger and hold every row of the batch.
    """
    positions, side = (16384, 128) if platform == "cpu" else (2**19, 512)
    q, k = min(side, q_length), min(side, k_length)
    rows = max(1, positions // (q * k)) if platform == "cpu" else batch
    return BlockSizes(q=q, k=k, rows=largest_divisor(batch, rows))


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of ``n`` that is not above ``at_most``."""
    return next(d for d in range(min(n, at_most), 0, -1) if n % d == 0)
