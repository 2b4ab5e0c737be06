"""The block sizes of the TPU kernels: those asked for, or the best of what fits VMEM."""

from typing import NamedTuple

from jax.experimental import pallas as pl

from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import MIB, Target
from dape_jax.attention.tpu_plan import Plan, make_plan
from dape_jax.attention.tpu_rows import LANES


class Plans(NamedTuple):
    """Of the two kernels of a call."""

    forward: Plan
    backward: Plan


def make_plans(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> Plans:
    def plan(backward: bool) -> Plan:
        chosen = blocks or default_blocks(spec, arrays, target, backward)
        assert chosen is not None, "the call was not checked"
        return make_plan(spec, arrays, chosen, target)

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


def default_blocks(spec: Spec, arrays: Arrays, target: Target, backward: bool) -> BlockSizes | None:
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
                plan = make_plan(spec, arrays, blocks, target)
                needed = backward_vmem_bytes(plan) if backward else forward_vmem_bytes(plan)
                if plan.block_q % plan.group == 0 and needed <= target.vmem_budget:
                    return blocks
    return None


def misfit(spec: Spec, arrays: Arrays, blocks: BlockSizes, target: Target) -> str | None:
    """Why the kernels cannot use these sizes; None if they can."""
    if blocks.rows != 1:
        return f"block size rows={blocks.rows}: the TPU kernels take one batch row at a time; 1 is needed"
    if blocks.q % 16:
        return f"block size q={blocks.q}: a multiple of 16 is needed by the TPU kernels"
    halo = 0 if spec.adapt is None else spec.adapt.halo
    if blocks.k % LANES or blocks.k <= 2 * halo:
        return f"block size k={blocks.k}: a multiple of {LANES} above {2 * halo} is needed by the TPU kernels"
    plan = make_plan(spec, arrays, blocks, target)
    needed = max(forward_vmem_bytes(plan), backward_vmem_bytes(plan))
    if needed > target.vmem_budget:
        sizes = f"block sizes q={blocks.q}, k={blocks.k} need about {needed / MIB:.0f} MiB of VMEM for these shapes"
        return f"{sizes}; at most {target.vmem_budget / MIB:.0f} MiB are to be used"
    return None
