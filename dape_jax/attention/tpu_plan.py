"""The static plan of a call of the TPU kernels, and the numbers of each block that steer it."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.tpu_rows import LANES, Rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call.

    Fields:
      spec: formulas and hyper-parameters.
      block_q, block_k: queries and keys of a tile, the keys with the halo of a convolving network on both sides.
      group: queries that pass through the network together.
      q_blocks, k_blocks: how many there are.
      kv_heads, head_dim: of k and v.
      exact: float32 inputs, with every product in full float32; else bfloat16.
      rows_of_positions, rows_of_keys: whether positions, and what is known of keys, differ between batch rows.
      segments: whether there are segment ids.
      padding: whether some key block may hold keys that nobody may attend to.
      first_query: position of the first query, where positions are consecutive.
    """

    spec: Spec
    block_q: int
    block_k: int
    group: int
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
    def tabled(self) -> bool:
        """Whether the forward takes everything that does not depend on S from ``tpu_tables``."""
        bias, adapt = self.spec.bias, self.spec.adapt
        if adapt is not None and (adapt.per_head or adapt.kernel_width > 1):
            return False
        if bias is None:
            return True
        tiles = self.block_k % self.block_q == 0 and self.block_q % self.slabs == 0
        rows = adapt is None or adapt.width % 8 == 0
        return self.spec.consecutive and bias.distance_only and tiles and rows

    @property
    def together(self) -> int:
        """Groups in one step of the forward's loop: several only where their working set is small."""
        return 2 if self.tabled and self.block_q % (2 * self.group) == 0 else 1

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


def make_plan(spec: Spec, arrays: Arrays, blocks: BlockSizes) -> Plan:
    """``blocks.k`` counts the keys of a tile with their halo."""
    q_length, d = arrays.q.shape[2:]
    kv_heads, _, k_length, _ = arrays.k.shape
    halo = 0 if spec.adapt is None else spec.adapt.halo
    own = blocks.k - 2 * halo
    rows_of_positions = arrays.q_positions.shape[0] > 1
    by_row = arrays.k_valid is not None or arrays.k_segments is not None or rows_of_positions
    return Plan(
        spec=spec,
        block_q=blocks.q,
        block_k=blocks.k,
        group=_group(spec, blocks),
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
    )


def _group(spec: Spec, blocks: BlockSizes) -> int:
    """Queries that pass the network together: whole float32 tiles of 8 rows, about 128 hidden units or rows."""
    least = 8 // math.gcd(8, spec.num_heads)
    per_query = spec.num_heads
    if spec.adapt is not None:
        # Networks of single heads keep all their hidden units of a group in VMEM, one after the other.
        per_query = max(per_query * (4 if spec.adapt.per_head else 1), spec.adapt.width)
    group = least
    while group * 2 * per_query <= 128 and blocks.q % (group * 2) == 0:
        group *= 2
    return group


class Plans(NamedTuple):
    """Of the two kernels of a call."""

    forward: Plan
    backward: Plan


def make_plans(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, vmem_budget: int) -> Plans:
    def plan(backward: bool) -> Plan:
        chosen = blocks or default_blocks(spec, arrays, vmem_budget, backward)
        assert chosen is not None, "the call was not checked"
        return make_plan(spec, arrays, chosen)

    return Plans(plan(False), plan(True))


def forward_vmem_bytes(plan: Plan) -> int:
    """Estimate of what the forward holds at once: scratch, blocks in flight, temporaries."""
    column = plan.tile_rows * LANES * 4
    padded_d = pl.cdiv(plan.head_dim, LANES) * LANES
    scratch = (plan.slabs + 3 + plan.needs_positions + plan.segments) * column
    scratch += plan.heads * plan.block_q * padded_d * 4
    if plan.tabled:
        u = 0 if plan.spec.adapt is None else plan.spec.adapt.width
        strip = plan.slabs * (u + _whole(plan.heads)) * 3 + plan.vectors * (2 * u + plan.rows.count)
        scratch += 4 * LANES * (strip + 2 * plan.together * plan.slabs * plan.hidden_rows)
    return scratch + _in_flight(plan, 1, 2) + _temporaries(plan)


def backward_vmem_bytes(plan: Plan) -> int:
    """Estimate of what the backward holds at once."""
    padded_d = pl.cdiv(plan.head_dim, LANES) * LANES
    column = plan.tile_rows * LANES * 4
    scratch = (2 * plan.slabs + 2 + plan.needs_positions + plan.segments) * column
    scratch += 2 * plan.kv_heads * plan.block_k * padded_d * 4 + plan.block_q * _lanes_of(plan, plan.heads) * 4
    return scratch + _in_flight(plan, 2, 4) + _temporaries(plan)


def _lanes_of(plan: Plan, heads: int) -> int:
    return pl.cdiv(heads * plan.head_dim, LANES) * LANES


def _in_flight(plan: Plan, of_queries: int, of_keys: int) -> int:
    """Two buffers of every block that comes or goes."""
    size = 4 if plan.exact else 2
    blocks = of_queries * plan.block_q * _lanes_of(plan, plan.heads)
    blocks += of_keys * plan.block_k * _lanes_of(plan, plan.kv_heads)
    return 2 * blocks * size + 2 * 3 * plan.block_q * LANES * 4


def _temporaries(plan: Plan) -> int:
    """Of a group's bias and network, and their weights."""
    adapt, rows = plan.spec.adapt, plan.rows
    features = getattr(plan.spec.bias, "num_buckets", getattr(plan.spec.bias, "width", 0))
    hidden = plan.group * features
    weights = rows.count * hidden
    if adapt is not None:
        network = adapt.width * (rows.count if adapt.per_head else plan.group)
        inputs = 2 * rows.count * (adapt.width if adapt.per_head else 1)
        hidden += network * (1 if adapt.per_head else adapt.kernel_width)
        weights += inputs * (network if not adapt.per_head else LANES) * adapt.kernel_width
    return 4 * plan.block_k * (hidden * 3 + rows.count * 8) + 4 * weights * 4


def _whole(n: int) -> int:
    return pl.cdiv(n, 8) * 8


def default_blocks(spec: Spec, arrays: Arrays, vmem_budget: int, backward: bool) -> BlockSizes | None:
    """The largest tile that fits, wide in keys, of at most 2,048 rows (query, head); None if none fits.

    A causal mask wastes half a tile for each block of queries, so that the widest are for long sequences.
    """
    q_length, k_length = arrays.q.shape[2], arrays.k.shape[2]
    halo = 0 if spec.adapt is None else spec.adapt.halo
    most_q, most_k = pl.cdiv(q_length, 16) * 16, pl.cdiv(k_length + 2 * halo, LANES) * LANES
    widths = (512, 256, 128) if backward or k_length < 4096 else (1024, 512, 256, 128)
    for q in (128, 64, 32, 16):
        for k in widths:
            blocks = BlockSizes(q=min(q, most_q), k=min(k, most_k), rows=1)
            if blocks.k > 2 * halo and q * spec.num_heads <= max(2048, 16 * spec.num_heads):
                plan = make_plan(spec, arrays, blocks)
                needed = backward_vmem_bytes(plan) if backward else forward_vmem_bytes(plan)
                if plan.block_q % plan.group == 0 and needed <= vmem_budget:
                    return blocks
    return None


def misfit(spec: Spec, arrays: Arrays, blocks: BlockSizes, vmem_budget: int) -> str | None:
    """Why the kernels cannot use these sizes; None if they can."""
    if blocks.rows != 1:
        return f"block size rows={blocks.rows}: the TPU kernels take one batch row at a time; 1 is needed"
    if blocks.q % 16:
        return f"block size q={blocks.q}: a multiple of 16 is needed by the TPU kernels"
    halo = 0 if spec.adapt is None else spec.adapt.halo
    if blocks.k % LANES or blocks.k <= 2 * halo:
        return f"block size k={blocks.k}: a multiple of {LANES} above {2 * halo} is needed by the TPU kernels"
    plan = make_plan(spec, arrays, blocks)
    needed = max(forward_vmem_bytes(plan), backward_vmem_bytes(plan))
    if needed > vmem_budget:
        sizes = f"block sizes q={blocks.q}, k={blocks.k} need about {needed / 2**20:.0f} MiB of VMEM for these shapes"
        return f"{sizes}; at most {vmem_budget / 2**20:.0f} MiB are to be used"
    return None
