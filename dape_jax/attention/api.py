"""``dape_attention``: one function with one meaning, whatever computes it."""

import dataclasses
import functools
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import blocks as blocks_lib
from dape_jax.attention import blockwise, gpu, reference, tpu
from dape_jax.attention import target as target_lib
from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.errors import UserError, nearest

_log = logging.getLogger(__name__)

BACKENDS = ("pallas_tpu", "pallas_gpu", "blockwise", "reference")
"""In the order in which "auto" tries them; the kernels only on their platform."""

_KERNELS = {"pallas_tpu": ("tpu", "TPU", tpu), "pallas_gpu": ("gpu", "GPU", gpu)}


def dape_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: biases.Bias | None = None,
    bias_params: biases.Params | None = None,
    adapt: adapt_lib.Adapt | None = None,
    adapt_params: adapt_lib.Params | None = None,
    causal: bool = True,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    k_valid: jax.Array | None = None,
    scale: float | None = None,
    backend: str = "auto",
    block_sizes: blocks_lib.BlockSizes | None = None,
    batch_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Attention with an additive position bias and the DAPE network on its logits.

    ``softmax(A) v`` with ``A = S + B + f(S, B)`` (arXiv 2405.14722, equation 3, for the default variant),
    ``S = scale q k^T``, B the position bias and f the network. Logits, bias, network and softmax are computed in
    float32 (float64 for float64 inputs). Differentiable in q, k, v, ``bias_params`` and ``adapt_params``.

    Args:
      q: [B, Tq, Hq, d].
      k, v: [B, Tk, Hkv, d] with Hq a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
      bias: position bias, None for none (NoPE, or rotary positions already in q and k).
      bias_params: its parameters, as ``bias.init(key, Hq)`` returns them. ALiBi has none.
      adapt: the DAPE network, None for plain attention.
      adapt_params: its parameters, as ``adapt.init(key, Hq, bias is not None)`` returns them.
      causal: a query attends to keys with k_position <= q_position. Otherwise to all, with the distance |i - j|.
      q_positions: int32 [Tq] or [B, Tq]; default the last Tq of 0 .. Tk-1. Differences of
        positions must stay below 2^31.
      k_positions: int32 [Tk] or [B, Tk]; default 0 .. Tk-1.
      q_segment_ids, k_segment_ids: int32 [B, Tq] and [B, Tk], both or neither; only equal ids attend to each other.
      k_valid: bool [B, Tk]; False marks padding, which nobody attends to.
      scale: of q k^T; default d ** -0.5.
      backend: "auto", or one of ``BACKENDS``, which is then used or refused, never replaced.
      block_sizes: tile of the backends other than the reference; by default chosen from the shapes.
      batch_axes: axes of the ambient mesh (``jax.set_mesh``) over which the batch is split. The attention then runs
        inside ``jax.shard_map``, each device on its own rows, with gradients of parameters summed once.
      head_axes: axes of the ambient mesh over which the heads are split, for attention that does not mix them: without
        a network, or with ``adapt.per_head``.

    Returns:
      [B, Tq, Hq, d] in the dtype of q. A query that may attend to nothing gives zeros, and zero gradients.

    Raises:
      UserError: an argument of the wrong shape, dtype or name; the message names it.
    """
    spec, arrays = check(
        q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, causal=causal,
        q_positions=q_positions, k_positions=k_positions, q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids,
        k_valid=k_valid, scale=scale,
    )  # fmt: skip
    if block_sizes is not None and not isinstance(block_sizes, blocks_lib.BlockSizes):
        raise UserError(f"block_sizes={block_sizes!r}: a BlockSizes is needed, such as BlockSizes(q=128, k=512)")
    for axes_name, axes in (("batch_axes", batch_axes), ("head_axes", head_axes)):
        if isinstance(axes, str) or not isinstance(axes, Collection):
            raise UserError(f"{axes_name}={axes!r}: a tuple of names is needed, such as ('data',)")
    if batch_axes or head_axes:
        out = _sharded(spec, backend, block_sizes, arrays, tuple(batch_axes), tuple(head_axes))
    else:
        out = _run(spec, backend, block_sizes, arrays)
    return jnp.transpose(out, (1, 2, 0, 3))


def choose_backend(
    backend: str = "auto",
    block_sizes: blocks_lib.BlockSizes | None = None,
    call: tuple[Spec, Arrays] | None = None,
) -> str:
    """The name of the backend that ``dape_attention`` would use, or UserError for one that cannot serve.

    Without ``call``, the checked arguments, the answer is the platform's, before shapes and dtypes are known.
    """
    target = target_lib.current()
    if backend == "auto":
        chosen = "blockwise"
        for name, (platform, _, kernels) in _KERNELS.items():
            if platform == target.platform:
                why = gpu.not_automatic(target, call) if kernels is gpu else None
                if why is None and call is not None:
                    why = _refusal(kernels, call, block_sizes, target)
                chosen = name if why is None else chosen
                if why is not None:
                    _log_once(f"attention backend {name} is not used: {why}")
        _log_once(f"attention backend: {chosen} (auto, {target.platform})")
        return chosen
    if backend not in BACKENDS:
        raise UserError(f"attention backend={backend!r} is unknown{nearest(backend, ('auto', *BACKENDS))}")
    if backend == "reference" and block_sizes is not None:
        raise UserError("block_sizes: the reference backend has no blocks; leave it None or use backend='blockwise'")
    if backend in _KERNELS:
        platform, device, kernels = _KERNELS[backend]
        if target.platform not in (platform, "interpret"):
            raise UserError(
                f"attention backend={backend!r} needs a {device}, and JAX runs on {target.platform}; "
                f"use 'auto' or 'blockwise', or compile for a {device} with "
                f"dape_jax.attention.compile_for({platform!r})"
            )
        why = None if call is None else _refusal(kernels, call, block_sizes, target)
        if why is not None:
            raise UserError(f"attention backend={backend!r}: {why}; use 'auto' or 'blockwise'")
    return backend


def _refusal(kernels: Any, call: tuple[Spec, Arrays], *how: Any) -> str | None:
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "jax_enable_x64 is set, and the kernels count in 32 bits"
    return kernels.refusal(*call, *how)


def backend_of_shapes(backend: str, shape: tuple[int, int, int, int], kv_heads: int, dtype: str, **kwargs: Any) -> str:
    """``choose_backend`` for self-attention with q of ``shape`` [B, T, Hq, d], before there are any arrays.

    ``kwargs``: ``bias``, ``adapt`` and ``causal`` of ``dape_attention``.
    """
    names = []

    def trace(q: jax.Array, k: jax.Array, key: jax.Array) -> None:
        bias, adapt = kwargs.get("bias"), kwargs.get("adapt")
        bias_params = None if bias is None else bias.init(key, shape[2])
        adapt_params = None if adapt is None else adapt.init(key, shape[2], bias is not None)
        call = check(q, k, k, bias_params=bias_params, adapt_params=adapt_params, **kwargs)
        names.append(choose_backend(backend, None, call))

    q = jax.ShapeDtypeStruct(shape, dtype)
    k = jax.ShapeDtypeStruct((*shape[:2], kv_heads, shape[3]), dtype)
    jax.eval_shape(trace, q, k, jax.eval_shape(lambda: jax.random.key(0)))
    return names[0]


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)


def _run(spec: Spec, backend: str, block_sizes: blocks_lib.BlockSizes | None, arrays: Arrays) -> jax.Array:
    """On one device: with its own rows and heads, by which the backend is chosen."""
    backend = choose_backend(backend, block_sizes, (spec, arrays))
    if backend == "reference":
        return reference.attend(spec, arrays)
    if backend in _KERNELS:
        return _KERNELS[backend][2].attend(spec, arrays, block_sizes, target_lib.current())
    _, batch, q_length, _ = arrays.q.shape
    if block_sizes is None:
        block_sizes = blocks_lib.heuristic(batch, q_length, arrays.k.shape[2], jax.default_backend())
    elif block_sizes.backward is not None:
        raise UserError("block size backward: the blockwise backend has one tile for both passes; leave it None")
    elif batch % block_sizes.rows:
        raise UserError(f"block size rows={block_sizes.rows} does not divide the batch of {batch} rows")
    return blockwise.attend(spec, arrays, block_sizes)


def _sharded(
    spec: Spec,
    backend: str,
    block_sizes: blocks_lib.BlockSizes | None,
    arrays: Arrays,
    batch_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
) -> jax.Array:
    """Every device's own rows and heads. The transpose of a replicated input sums its gradient over the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    for what, axes in (("batch_axes", batch_axes), ("head_axes", head_axes)):
        missing = [axis for axis in axes if axis not in mesh.axis_names]
        if missing:
            raise UserError(
                f"{what}: no axis {missing[0]!r} in the ambient mesh {mesh.axis_names}; "
                f"enter one with jax.set_mesh, or leave {what} empty"
            )
    both = set(batch_axes) & set(head_axes)
    if both:
        raise UserError(f"head_axes: axis {min(both)!r} is one of batch_axes, too; an axis splits rows or heads")
    if head_axes and spec.adapt is not None and not spec.adapt.per_head:
        raise UserError("head_axes: the network mixes heads, which cannot be split; adapt.per_head=True does not mix")
    rows, parts = (math.prod(mesh.shape[axis] for axis in axes) for axes in (batch_axes, head_axes))
    batch, kv_heads = arrays.q.shape[1], arrays.k.shape[0]
    if batch % rows:
        raise UserError(f"batch of {batch} rows cannot be split over {rows} devices (mesh axes {batch_axes})")
    if kv_heads % parts:
        raise UserError(f"{kv_heads} heads of k cannot be split over {parts} devices (mesh axes {head_axes})")
    if spec.bias is not None:  # ALiBi's slopes depend on the place among all heads
        constants = {n: jnp.asarray(x) for n, x in spec.bias.constants(spec.num_heads).items()} if head_axes else {}
        arrays = arrays._replace(bias_params={**constants, **arrays.bias_params})
    specs = _specs(spec, arrays, batch_axes, head_axes)
    local = dataclasses.replace(spec, num_heads=spec.num_heads // parts)
    run = functools.partial(_run, local, backend, block_sizes)
    return jax.shard_map(
        run, in_specs=(specs,), out_specs=specs.q, axis_names={*batch_axes, *head_axes}, check_vma=False
    )(arrays)


def _specs(spec: Spec, arrays: Arrays, batch_axes: tuple[str, ...], head_axes: tuple[str, ...]) -> Arrays:
    """A partition for every array."""
    heads, rows, replicated = head_axes or None, PartitionSpec(batch_axes or None), PartitionSpec()
    shared = frozenset() if spec.bias is None else spec.bias.shared

    def spec_of(name: str, x: Any) -> Any:
        if name in ("q", "k", "v"):
            return PartitionSpec(heads, batch_axes or None)
        if name.endswith("params"):
            return {n: replicated if name == "bias_params" and n in shared else PartitionSpec(heads) for n in x}
        if x is None:
            return None
        return replicated if name.endswith("positions") and x.shape[0] == 1 else rows

    return Arrays(**{name: spec_of(name, x) for name, x in arrays._asdict().items()})


def check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: biases.Bias | None = None,
    bias_params: biases.Params | None = None,
    adapt: adapt_lib.Adapt | None = None,
    adapt_params: adapt_lib.Params | None = None,
    causal: bool = True,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    k_valid: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[Spec, Arrays]:
    """The arguments of ``dape_attention``, checked, with defaults filled in, as the backends take them."""
    if bias is not None and not isinstance(bias, biases.Bias):
        raise UserError(f"bias={bias!r}: a position bias such as KerpleLog() is needed, or None")
    if adapt is not None and not isinstance(adapt, adapt_lib.Adapt):
        raise UserError(f"adapt={adapt!r}: an Adapt() is needed, or None")
    if not isinstance(causal, bool | np.bool_):
        raise UserError(f"causal={causal!r}: True or False is needed")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x)
        if x.ndim != 4:
            raise UserError(f"{name} has shape {x.shape}; [batch, time, heads, head dimension] is needed")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(f"{name} has dtype {x.dtype}; a floating-point one is needed")
        if x.dtype != q.dtype:
            raise UserError(f"{name} has dtype {x.dtype} and q has {q.dtype}; one dtype is needed")
        if x.size == 0:
            raise UserError(f"{name} has shape {x.shape}; no dimension may be 0")
    batch, q_length, heads, d = q.shape
    k_length, kv_heads = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != d:
        raise UserError(
            f"k {k.shape} and v {v.shape} must be alike and fit the batch and head dimension of q {q.shape}"
        )
    if heads % kv_heads:
        raise UserError(f"q has {heads} heads, which is no multiple of the {kv_heads} heads of k and v")
    if k_positions is None and q_positions is None and q_length > k_length:
        raise UserError(f"{q_length} queries for {k_length} keys: give q_positions; by default they are the last keys'")
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise UserError("q_segment_ids and k_segment_ids: give both or neither")
    rows_only = {"q_segment_ids": (q_segment_ids, q_length), "k_segment_ids": (k_segment_ids, k_length),
                 "k_valid": (k_valid, k_length)}  # fmt: skip
    for name, (x, length) in rows_only.items():
        if x is not None:
            _check_array(name, x)
        if x is not None and x.shape != (batch, length):
            raise UserError(f"{name} has shape {x.shape}; {(batch, length)} is needed")
        if x is not None and name != "k_valid" and not jnp.issubdtype(x.dtype, jnp.integer):
            raise UserError(f"{name} has dtype {x.dtype}; integers are needed")
    if k_valid is not None and k_valid.dtype != jnp.bool_:
        raise UserError(f"k_valid has dtype {k_valid.dtype}; bool is needed")
    consecutive = q_positions is None and k_positions is None
    if k_positions is None:
        k_positions = jnp.arange(k_length, dtype=jnp.int32)
    if q_positions is None:
        q_positions = jnp.arange(k_length - q_length, k_length, dtype=jnp.int32)
    q_positions = _positions("q_positions", q_positions, batch, q_length)
    k_positions = _positions("k_positions", k_positions, batch, k_length)
    if q_positions.shape[0] != k_positions.shape[0]:
        q_positions = jnp.broadcast_to(q_positions, (batch, q_length))
        k_positions = jnp.broadcast_to(k_positions, (batch, k_length))
    spec = Spec(bias, adapt, bool(causal), _scale(d, scale), heads, consecutive)
    bias_params, adapt_params = _params("bias_params", bias_params), _params("adapt_params", adapt_params)
    _check_params(spec, bias_params, adapt_params)
    q, k, v = (jnp.transpose(x, (2, 0, 1, 3)) for x in (q, k, v))
    return spec, Arrays(
        q, k, v, bias_params, adapt_params, q_positions, k_positions, q_segment_ids, k_segment_ids, k_valid
    )  # fmt: skip


def _check_array(name: str, x: Any) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise UserError(f"{name} is of type {type(x).__name__}; an array is needed")


def _scale(head_dim: int, scale: Any) -> float:
    try:
        value = float(head_dim**-0.5 if scale is None else scale)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"scale={scale!r}: a finite number is needed, or None")
    return value


def _params(name: str, params: Any) -> dict[str, jax.Array]:
    if not isinstance(params, Mapping | None):
        raise UserError(f"{name} is of type {type(params).__name__}; a mapping of names to arrays is needed")
    for key, x in (params or {}).items():
        _check_array(f"{name}[{key!r}]", x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(f"{name}[{key!r}] has dtype {x.dtype}; a floating-point one is needed")
    return dict(params or {})


def _positions(name: str, x: jax.Array, batch: int, length: int) -> jax.Array:
    _check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise UserError(f"{name} has dtype {x.dtype}; int32 is needed, since floating-point positions alias")
    if x.shape not in ((length,), (batch, length)):
        raise UserError(f"{name} has shape {x.shape}; {(length,)} or {(batch, length)} is needed")
    x = x.astype(jnp.int32)
    return x[None] if x.ndim == 1 else x


def _check_params(spec: Spec, bias_params: Mapping, adapt_params: Mapping) -> None:
    if spec.bias is None and bias_params:
        raise UserError(f"bias_params {sorted(bias_params)} given without a bias")
    if spec.adapt is None and adapt_params:
        raise UserError(f"adapt_params {sorted(adapt_params)} given without adapt")
    key = jax.eval_shape(lambda: jax.random.key(0))
    if spec.bias is not None:
        init = functools.partial(spec.bias.init, num_heads=spec.num_heads)
        needed = {name: x.shape for name, x in jax.eval_shape(init, key).items()}
        constants = {name: x.shape for name, x in spec.bias.constants(spec.num_heads).items()}
        given = {name: x.shape for name, x in bias_params.items()}
        _same("bias_params", {**constants, **needed}, {**constants, **given})
    if spec.adapt is not None:
        needed = spec.adapt.shapes(spec.num_heads, spec.bias is not None)
        _same("adapt_params", needed, {name: x.shape for name, x in adapt_params.items()})


def _same(what: str, needed: Mapping[str, tuple], given: Mapping[str, tuple]) -> None:
    for name in sorted({*needed, *given}):
        if name not in given:
            raise UserError(f"{what}[{name!r}] is missing; shape {needed[name]} is needed")
        if name not in needed:
            raise UserError(f"{what}[{name!r}] is no parameter of this call; {sorted(needed)} are")
        if needed[name] != given[name]:
            raise UserError(f"{what}[{name!r}] has shape {given[name]}; {needed[name]} is needed")


__all__ = ["BACKENDS", "backend_of_shapes", "choose_backend", "dape_attention"]
