"""The block sizes of the TPU kernels: those asked for, those tuned for a shape, or the largest that fit VMEM."""

import functools
from typing import NamedTuple

from jax.experimental import pallas as pl

from dape_jax.attention import tuned
from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import MIB, Target
from dape_jax.attention.tpu_plan import Plan, make_plan
from dape_jax.attention.tpu_rows import LANES, whole


class Plans(NamedTuple):
    """Of a call: of the forward alone, of one that a backward follows, and of the backward."""

    forward: Plan
    saving: Plan
    backward: Plan


def make_plans(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> Plans:
    """For a call without a ``misfit``."""
    tiles = [_asked_for(blocks, backward) or choose(spec, arrays, target, backward) for backward in (False, True)]
    forward, backward = (tile for tile in tiles if tile is not None)
    of = functools.partial(make_plan, spec, arrays, target=target)
    # What one of them rounds differently would be a difference in the probabilities, large where logits are.
    tables = all(of(tile, saving=True).tabled for tile in (forward, backward))
    saving, gradients = (of(tile, saving=True, tables=tables) for tile in (forward, backward))
    return Plans(of(forward, saving=False), saving, gradients)


def _asked_for(blocks: BlockSizes | None, backward: bool) -> BlockSizes | None:
    return blocks.backward if blocks is not None and backward and blocks.backward is not None else blocks


def choose(spec: Spec, arrays: Arrays, target: Target, backward: bool) -> BlockSizes | None:
    """The tile of one kernel: from ``tpu_tuned.json`` if it has the device and the shape, else ``default_blocks``."""
    entry = tuned.find("tpu", spec, arrays, target, "backward" if backward else "forward")
    if entry is not None:
        blocks = BlockSizes(q=entry["block_q"], k=entry["block_k"])
        if _why_not(spec, arrays, blocks, target, backward) is None:
            return blocks
    return default_blocks(spec, arrays, target, backward)


def vmem_bytes(spec: Spec, arrays: Arrays, blocks: BlockSizes, target: Target, backward: bool) -> int:
    """Estimate of what a kernel holds at once: scratch, blocks in flight, temporaries."""
    of = functools.partial(make_plan, spec, arrays, blocks, target)
    if backward:
        return max(_backward_vmem_bytes(of(saving=True, tables=tables)) for tables in (True, False))
    every = (of(saving=saving, tables=tables) for saving in (True, False) for tables in (True, False))
    return max(map(_forward_vmem_bytes, every))


def vmem_limit(plan: Plan, target: Target, backward: bool) -> int:
    """Bytes that the compiler may use for a kernel."""
    needed = (_backward_vmem_bytes if backward else _forward_vmem_bytes)(plan)
    return next(vmem.limit for vmem in target.vmem if needed <= vmem.budget)


def _forward_vmem_bytes(plan: Plan) -> int:
    column = plan.tile_rows * LANES * 4
    padded_d = pl.cdiv(plan.head_dim, LANES) * LANES
    scratch = (plan.slabs + 3 + plan.needs_positions + plan.segments) * column
    scratch += plan.heads * plan.block_q * padded_d * 4
    if plan.tabled:
        scratch += _strip_bytes(plan, 2) + 4 * LANES * 2 * plan.together * plan.slabs * plan.hidden_rows
    return scratch + _in_flight(plan, 1, 2) + _temporaries(plan)


def _strip_bytes(plan: Plan, hidden: int) -> int:
    """Of what a tile takes from the tables, with so many copies of the hidden layer."""
    if plan.spec.bias is None:
        return 0
    u = 0 if plan.spec.adapt is None else plan.spec.adapt.width
    fetched = plan.slabs * (u + whole(plan.heads)) * 3
    logits = (plan.vectors + plan.group - 1) * plan.rows.count
    return 4 * LANES * (fetched + plan.vectors * hidden * u + logits)


def _backward_vmem_bytes(plan: Plan) -> int:
    padded_d = pl.cdiv(plan.head_dim, LANES) * LANES
    column = plan.tile_rows * LANES * 4
    scratch = (2 * plan.slabs + 2 + plan.needs_positions + plan.segments) * column
    scratch += 2 * plan.kv_heads * plan.block_k * padded_d * 4 + plan.block_q * _lanes_of(plan, plan.heads) * 4
    if plan.tabled:
        scratch += _strip_bytes(plan, 2) + _strip_bytes(plan, 1)
        scratch += 4 * LANES * 2 * plan.together * plan.slabs * (2 * plan.hidden_rows + plan.parts * plan.rows.count)
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


def default_blocks(spec: Spec, arrays: Arrays, target: Target, backward: bool) -> BlockSizes | None:
    """The largest tile that fits the usual VMEM, wide in keys, of at most 2,048 rows (query, head); where none does,
    the one that needs the least, of all the VMEM that a kernel may take; None if that does not fit either.

    A causal mask wastes half a tile for each block of queries, so that the widest are for long sequences.
    """
    q_length, k_length = arrays.q.shape[2], arrays.k.shape[2]
    halo = 0 if spec.adapt is None else spec.adapt.halo
    most_q, most_k = pl.cdiv(q_length, 16) * 16, pl.cdiv(k_length + 2 * halo, LANES) * LANES
    widths = (512, 256, 128) if backward or k_length < 2048 else (1024, 512, 256, 128)
    needs: dict[BlockSizes, int] = {}
    for q in (128, 64, 32, 16):
        for k in widths:
            blocks = BlockSizes(q=min(q, most_q), k=min(k, most_k), rows=1)
            if blocks.k <= 2 * halo or q * spec.num_heads > max(2048, 16 * spec.num_heads):
                continue
            needs[blocks] = vmem_bytes(spec, arrays, blocks, target, backward)
            if needs[blocks] <= target.vmem[0].budget:
                return blocks
    least = min(needs, key=lambda blocks: needs[blocks], default=None)
    return least if least is not None and needs[least] <= target.vmem[-1].budget else None


def misfit(spec: Spec, arrays: Arrays, blocks: BlockSizes, target: Target) -> str | None:
    """Why the kernels cannot use these sizes; None if they can."""
    for backward in (False, True):
        asked_for = _asked_for(blocks, backward)
        assert asked_for is not None
        why = _why_not(spec, arrays, asked_for, target, backward)
        if why is not None:
            return why if asked_for is blocks else f"block size backward: {why}"
    return None


def _why_not(spec: Spec, arrays: Arrays, blocks: BlockSizes, target: Target, backward: bool) -> str | None:
    if blocks.rows != 1:
        return f"block size rows={blocks.rows}: the TPU kernels take one batch row at a time; 1 is needed"
    if blocks.q % 16:
        return f"block size q={blocks.q}: a multiple of 16 is needed by the TPU kernels"
    halo = 0 if spec.adapt is None else spec.adapt.halo
    if blocks.k % LANES or blocks.k <= 2 * halo:
        return f"block size k={blocks.k}: a multiple of {LANES} above {2 * halo} is needed by the TPU kernels"
    needed = vmem_bytes(spec, arrays, blocks, target, backward)
    most = target.vmem[-1].budget
    if needed > most:
        kernel = "backward" if backward else "forward"
        sizes = f"block sizes q={blocks.q}, k={blocks.k} need about {needed / MIB:.0f} MiB of VMEM in the {kernel}"
        return f"{sizes} for these shapes; at most {most / MIB:.0f} MiB are to be used"
    return None
