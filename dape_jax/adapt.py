"""The DAPE map: a two-layer network that reads logits S and position bias B and corrects the bias from the data.

    A = S + B + W2 . LeakyReLU(W1 . concat(S, B) + b1) + b2        (concat_residual, the paper's default)

at every (query, key) pair, all heads at once: the network mixes heads. ``per_head=True`` gives every head a network
of its own instead (2 -> D -> 1). Without a bias (NoPE, RoPE) the network reads S alone: A = S + f(S).

All variants are one computation: a share of S and a share of B in the hidden layer, and a residual. The share of B
does not depend on the batch, so it is separate (``bias_terms``), and attention computes it once for all rows.

Source: arXiv 2405.14722, section 3 and its appendix on variants. Axes: H heads, D width, C input channels; logits
have the head axis first, [H, ..., Tq, Tk].
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dape_jax.errors import UserError, nearest

Params = Mapping[str, jax.Array]

VARIANTS = ("concat_residual", "concat", "add_residual")
_HIGHEST = jax.lax.Precision.HIGHEST  # one bfloat16 pass over S and B costs up to 40 % of the gradient of W1
_SLOPE = 0.01


@dataclasses.dataclass(frozen=True)
class Adapt:
    """Which DAPE network: hyper-parameters only.

    Fields:
      variant: "concat_residual": S + B + f(S, B); "concat": S + f(S, B); "add_residual": S + B + f(S + B).
      width: D, hidden units.
      per_head: a network for each head rather than one for all heads together.
    """

    variant: str = "concat_residual"
    width: int = 32
    per_head: bool = False

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise UserError(f"DAPE variant={self.variant!r} is unknown{nearest(self.variant, VARIANTS)}")
        if not isinstance(self.width, int) or self.width < 1:
            raise UserError(f"DAPE width={self.width!r}: a positive integer is needed")

    def channels(self, num_heads: int, has_bias: bool) -> int:
        """C, the number of inputs of one network."""
        heads = 1 if self.per_head else num_heads
        return 2 * heads if has_bias and self.variant != "add_residual" else heads

    def shapes(self, num_heads: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters; with ``per_head`` each has a leading axis [H]. The axis of 1 is along the keys."""
        outputs = 1 if self.per_head else num_heads
        inputs = self.channels(num_heads, has_bias)
        shapes = {"w1": (1, inputs, self.width), "b1": (self.width,), "w2": (1, self.width, outputs), "b2": (outputs,)}
        return {name: (num_heads, *shape) for name, shape in shapes.items()} if self.per_head else shapes

    def init(self, key: jax.Array, num_heads: int, has_bias: bool = True) -> dict[str, jax.Array]:
        """Fresh float32 parameters, uniform in +-1 / sqrt(fan_in), as the official code's defaults are."""
        fan_in = {"w1": self.channels(num_heads, has_bias), "w2": self.width}
        fan_in |= {"b1": fan_in["w1"], "b2": fan_in["w2"]}
        return {
            name: jax.random.uniform(k, shape, jnp.float32, -(fan_in[name] ** -0.5), fan_in[name] ** -0.5)
            for (name, shape), k in zip(self.shapes(num_heads, has_bias).items(), jax.random.split(key, 4), strict=True)
        }


class BiasTerms(NamedTuple):
    """What the bias contributes to the logits of one tile, for any number of batch rows.

    Attributes:
      residual: [H, 1, Tq, Tk], added to the logits; None where there is none.
      hidden: the hidden layer's share of B with b1, [D, 1, Tq, Tk] ([H, D, 1, Tq, Tk] with per_head); None without
        a network.
    """

    residual: jax.Array | None
    hidden: jax.Array | None


def bias_terms(adapt: Adapt | None, params: Params | None, bias: jax.Array | None) -> BiasTerms:
    """Computes everything that does not depend on S. ``bias`` is [H, Tq, Tk] or None."""
    bias = None if bias is None else bias[:, None]
    if adapt is None or params is None:
        return BiasTerms(bias, None)
    residual = None if adapt.variant == "concat" else bias

    def hidden(params: Params, bias: jax.Array | None) -> jax.Array:
        b1 = params["b1"][:, None, None, None]
        if bias is None:
            return b1
        _, w1_bias = _split_w1(adapt, params["w1"], has_bias=True)
        return mix(bias, w1_bias) + b1

    if adapt.per_head:
        in_axes = (0, None if bias is None else 0)
        hidden = jax.vmap(hidden, in_axes=in_axes)
        return BiasTerms(residual, hidden(params, None if bias is None else bias[:, None]))
    return BiasTerms(residual, hidden(params, bias))


def adapt_logits(adapt: Adapt | None, params: Params | None, logits: jax.Array, terms: BiasTerms) -> jax.Array:
    """The logits that enter the softmax.

    Args:
      adapt: the network, or None for S + B.
      params: its parameters, in the dtype of ``logits``. b2 may be left out: it adds a constant to a whole row, which
        the softmax cancels, so attention that needs no logits skips it and its gradient is exactly zero.
      logits: S, [H, B, Tq, Tk].
      terms: of ``bias_terms`` for the same tile.

    Returns:
      A, [H, B, Tq, Tk].
    """
    out = logits if terms.residual is None else logits + terms.residual
    if adapt is None or params is None or terms.hidden is None:
        return out

    def network(params: Params, logits: jax.Array, hidden_bias: jax.Array) -> jax.Array:
        w1, _ = _split_w1(adapt, params["w1"], has_bias=params["w1"].shape[1] != logits.shape[0])
        hidden = jax.nn.leaky_relu(mix(logits, w1) + hidden_bias, _SLOPE)
        correction = mix(hidden, params["w2"][0])
        return correction + params["b2"][:, None, None, None] if "b2" in params else correction

    if adapt.per_head:
        return out + jax.vmap(network)(params, logits[:, None], terms.hidden)[:, 0]
    return out + network(params, logits, terms.hidden)


@jax.custom_vjp
def mix(x: jax.Array, w: jax.Array) -> jax.Array:
    """``y[d] = sum_c w[c, d] x[c]``: [C, B, Tq, Tk] and [C, D] to [D, B, Tq, Tk], channels first on both sides.

    Reverse-mode only: its gradient is written out because the one that XLA derives for ``w`` transposes both
    arrays, and then takes longer than everything else in the network together.
    """
    return jax.lax.dot_general(w, x, (((0,), (0,)), ((), ())), precision=_HIGHEST)


def _mix_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return mix(x, w), (x, w)


def _mix_bwd(saved: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    d_x = jax.lax.dot_general(w, d_y, (((1,), (0,)), ((), ())), precision=_HIGHEST)
    d_w = jax.lax.dot_general(x, d_y, (((2, 3), (2, 3)), ((1,), (1,))), precision=_HIGHEST)
    return d_x, d_w.sum(axis=0)


mix.defvjp(_mix_fwd, _mix_bwd)


def _split_w1(adapt: Adapt, w1: jax.Array, has_bias: bool) -> tuple[jax.Array, jax.Array]:
    """W1's columns for S and for B, each [channels, D]; add_residual reads S + B, so both are the whole of W1."""
    w1 = w1[0]
    if adapt.variant == "add_residual" or not has_bias:
        return w1, w1
    half = w1.shape[0] // 2
    return w1[:half], w1[half:]
