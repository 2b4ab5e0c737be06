"""The static plan of a call of the TPU kernels, and the numbers of each block that steer it."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import Target
from dape_jax.attention.tpu_rows import LANES, Rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call.

    Fields:
      spec: formulas and hyper-parameters.
      block_q, block_k: queries and keys of a tile, the keys with the halo of a convolving network on both sides.
      group: queries that pass through the network together.
      joined: slabs of keys that enter one product of the network.
      q_blocks, k_blocks: how many there are.
      kv_heads, head_dim: of k and v.
      exact: float32 inputs, with every product in full float32; else bfloat16.
      rows_of_positions, rows_of_keys: whether positions, and what is known of keys, differ between batch rows.
      segments: whether there are segment ids.
      padding: whether some key block may hold keys that nobody may attend to.
      first_query: position of the first query, where positions are consecutive.
      saving: whether a backward follows, or this is one.
      tabled: whether everything that does not depend on S is taken from ``tpu_tables``.
    """

    spec: Spec
    block_q: int
    block_k: int
    group: int
    joined: int
    q_blocks: int
    k_blocks: int
    kv_heads: int
    head_dim: int
    exact: bool
    rows_of_positions: bool
    rows_of_keys: bool
    segments: bool
    padding: bool
    first_query: int
    saving: bool
    tabled: bool

    @property
    def heads(self) -> int:
        return self.spec.num_heads

    @property
    def halo(self) -> int:
        return 0 if self.spec.adapt is None else self.spec.adapt.halo

    @property
    def own_keys(self) -> int:
        return self.block_k - 2 * self.halo

    @property
    def rows(self) -> Rows:
        return Rows(self.spec, self.group, self.block_k, self.exact)

    @property
    def tile_rows(self) -> int:
        return self.block_q * self.heads

    @property
    def slabs(self) -> int:
        return self.block_k // LANES

    @property
    def needs_positions(self) -> bool:
        return self.spec.causal or self.spec.bias is not None

    @property
    def can_be_tabled(self) -> bool:
        bias, adapt = self.spec.bias, self.spec.adapt
        if adapt is not None and (adapt.per_head or adapt.kernel_width > 1):
            return False
        if bias is None:
            return True
        tiles = self.block_k % self.block_q == 0 and self.block_q % self.slabs == 0
        rows = adapt is None or adapt.width % 8 == 0
        return self.spec.consecutive and bias.distance_only and tiles and rows

    @property
    def parts(self) -> int:
        """Of W1 S, from tables, in bfloat16: high and low S by high W1, and for gradients high S by low W1. A hidden
        unit that rounding moves over LeakyReLU's kink takes the other slope."""
        return 1 if self.exact else 3 if self.saving else 2

    @property
    def precise_values(self) -> bool:
        """Whether probabilities meet the values in a high and a low part: rounded once they make each row of logit
        gradients sum to a little more or less than zero."""
        return self.saving and not self.exact and self.spec.steep

    @property
    def high_and_low(self) -> int:
        """Rows of a group's S in as many parts as it has."""
        return self.rows.count * (1 if self.exact else 2)

    @property
    def together(self) -> int:
        """Groups in one step of a kernel's loop: several only where their working set is small."""
        fitting = (n for n in (4, 2) if n * self.group <= 8 and self.block_q % (n * self.group) == 0)
        return next(fitting, 1) if self.tabled else 1

    @property
    def hidden_rows(self) -> int:
        """Of the hidden layers of a group, one for all heads of a query."""
        return 0 if self.spec.adapt is None else self.group * self.spec.adapt.width

    @property
    def vectors(self) -> int:
        """Of 128 distances each, that a tile needs."""
        return self.block_q + self.slabs - 1

    @property
    def origin(self) -> int:
        """The table entry of distance 0. The tile of the last queries and the first keys begins at entry 0."""
        return self.first_query + self.q_blocks * self.block_q - 1

    def strip_start(self, i: Any, j: Any) -> Any:
        """The table entry of a tile's last query and first key."""
        return self.origin - self.first_query - (i + 1) * self.block_q + 1 + j * self.block_k

    @property
    def entries(self) -> int:
        """Of the tables."""
        last = self.origin if self.spec.causal else self.strip_start(0, self.k_blocks - 1)
        return (last // self.block_k + 3) * self.block_k

    def head(self, h: int) -> slice:
        """The lanes of query head h in [.., H d]."""
        return slice(h * self.head_dim, (h + 1) * self.head_dim)

    def kv_head(self, h: int) -> slice:
        """The lanes, in [.., N d], of the key head that query head h reads."""
        return self.head(h // (self.heads // self.kv_heads))


class Scalars(NamedTuple):
    """Per block, in scalar memory, flat: least and greatest positions [rows x blocks], whether every key may be
    attended to as far as padding goes, and the first and one past the last block of the inner grid axis needed."""

    q_min: Any
    q_max: Any
    k_min: Any
    k_max: Any
    k_full: Any
    first: Any
    last: Any


def row_index(b: Any, block: Any, blocks: int, differ: bool) -> Any:
    """Where ``Scalars`` keep a block of batch row b; all rows share one entry unless they differ."""
    return b * blocks + block if differ else block


def make_plan(
    spec: Spec, arrays: Arrays, blocks: BlockSizes, target: Target, saving: bool, tables: bool = True
) -> Plan:
    """``blocks.k`` counts the keys of a tile with their halo. With ``tables``, they serve where they can."""
    q_length, d = arrays.q.shape[2:]
    kv_heads, _, k_length, _ = arrays.k.shape
    halo = 0 if spec.adapt is None else spec.adapt.halo
    own = blocks.k - 2 * halo
    rows_of_positions = arrays.q_positions.shape[0] > 1
    by_row = arrays.k_valid is not None or arrays.k_segments is not None or rows_of_positions
    plan = Plan(
        spec=spec,
        block_q=blocks.q,
        block_k=blocks.k,
        group=_group(spec, blocks, 2),
        joined=math.gcd(blocks.k // LANES, target.mxu // LANES),
        q_blocks=pl.cdiv(q_length, blocks.q),
        k_blocks=pl.cdiv(k_length, own),
        kv_heads=kv_heads,
        head_dim=d,
        exact=arrays.q.dtype == jnp.float32,
        rows_of_positions=rows_of_positions,
        rows_of_keys=by_row,
        segments=arrays.q_segments is not None,
        padding=arrays.k_valid is not None or k_length % own > 0 or halo > 0,
        first_query=k_length - q_length,
        saving=saving,
        tabled=False,
    )
    if not (tables and plan.can_be_tabled):
        return plan
    return dataclasses.replace(plan, tabled=True, group=_group(spec, blocks, plan.parts, target.mxu if saving else 128))


def _group(spec: Spec, blocks: BlockSizes, parts: int, mxu: int = 128) -> int:
    """Queries that pass the network together: whole float32 tiles of 8 rows, as many as one pass of the MXU takes.

    ``parts``: inputs of the network for each head.
    """
    least = 8 // math.gcd(8, spec.num_heads)
    per_query = spec.num_heads
    if spec.adapt is not None and spec.adapt.per_head:
        # All hidden units of a group are in VMEM, one after the other.
        per_query = 4 * spec.num_heads
    elif spec.adapt is not None:
        per_query = max(parts * spec.num_heads, spec.adapt.width)
    group = least
    while group * 2 * per_query <= mxu and blocks.q % (group * 2) == 0:
        group *= 2
    return group
