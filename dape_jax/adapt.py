"""The DAPE map: a two-layer network that reads logits S and position bias B and corrects the bias from the data.

    A = S + B + W2 . LeakyReLU(W1 . concat(S, B) + b1) + b2        (concat_residual, the paper's default)

at every (query, key) pair, all heads at once: the network mixes heads. ``per_head=True`` gives every head a network
of its own instead (2 -> D -> 1). Without a bias (NoPE, RoPE) the network reads S alone: A = S + f(S).

All variants are one computation: a share of S and a share of B in the hidden layer, and a residual. The share of B
does not depend on the batch, so it is separate (``bias_terms``), and attention computes it once for all rows.

DAPE V2 (``kernel_width`` k > 1) makes the two layers 1 x k convolutions along the keys. Every entry that a query may
not attend to is zero in S and in B before the first one, and each convolution pads with zeros beyond the first and last
key; keys that pad a row (``k_valid`` of ``dape_attention``) are beyond, so that padding changes nothing. A tile of n
keys then needs its neighbours: S and B on n + 4p keys (p = k // 2), the hidden layer on n + 2p.

Sources: arXiv 2405.14722, section 3 and its appendix on variants; V2 arXiv 2410.04798. Axes: H heads, D width, C input
channels; logits have the head axis first, [H, B, Tq, Tk].
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dape_jax.errors import UserError, nearest

Params = Mapping[str, jax.Array]

VARIANTS = ("concat_residual", "concat", "add_residual", "bias_only")
_HIGHEST = jax.lax.Precision.HIGHEST  # one bfloat16 pass over S and B costs up to 40 % of the gradient of W1
SLOPE = 0.01


@dataclasses.dataclass(frozen=True)
class Adapt:
    """Which DAPE network: hyper-parameters only.

    Fields:
      variant: "concat_residual": S + B + f(S, B); "concat": S + f(S, B); "add_residual": S + B + f(S + B);
        "bias_only": S + B + f(B), an ablation of the paper.
      width: D, hidden units.
      per_head: a network for each head rather than one for all heads together.
      kernel_width: k, odd; 1 is DAPE, 3 the width of DAPE V2.
    """

    variant: str = "concat_residual"
    width: int = 32
    per_head: bool = False
    kernel_width: int = 1

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise UserError(f"DAPE variant={self.variant!r} is unknown{nearest(self.variant, VARIANTS)}")
        if not isinstance(self.width, int) or self.width < 1:
            raise UserError(f"DAPE width={self.width!r}: a positive integer is needed")
        if not isinstance(self.kernel_width, int) or self.kernel_width < 1 or self.kernel_width % 2 == 0:
            raise UserError(f"DAPE kernel_width={self.kernel_width!r}: a positive odd integer is needed")

    @property
    def halo(self) -> int:
        """How many keys to each side of a tile its logits depend on: 2p, 0 for DAPE."""
        return 2 * (self.kernel_width // 2)

    def channels(self, num_heads: int, has_bias: bool) -> int:
        """C, the number of inputs of one network."""
        if self.variant == "bias_only" and not has_bias:
            raise UserError("DAPE variant='bias_only' needs a position bias; with NoPE and RoPE there is none")
        heads = 1 if self.per_head else num_heads
        return 2 * heads if has_bias and self.variant in ("concat_residual", "concat") else heads

    def shapes(self, num_heads: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters; with ``per_head`` each has a leading axis [H]."""
        outputs, inputs = 1 if self.per_head else num_heads, self.channels(num_heads, has_bias)
        k, width = self.kernel_width, self.width
        shapes = {"w1": (k, inputs, width), "b1": (width,), "w2": (k, width, outputs), "b2": (outputs,)}
        return {name: (num_heads, *shape) for name, shape in shapes.items()} if self.per_head else shapes

    def init(self, key: jax.Array, num_heads: int, has_bias: bool = True) -> dict[str, jax.Array]:
        """Fresh float32 parameters, uniform in +-1 / sqrt(fan_in), as the official code's defaults are."""
        fan_in = {"w1": self.kernel_width * self.channels(num_heads, has_bias), "w2": self.kernel_width * self.width}
        bounds = {name: fan_in[name.replace("b", "w")] ** -0.5 for name in ("w1", "b1", "w2", "b2")}
        shapes, keys = self.shapes(num_heads, has_bias), jax.random.split(key, 4)
        return {
            name: jax.random.uniform(k, shape, jnp.float32, -bounds[name], bounds[name])
            for (name, shape), k in zip(shapes.items(), keys, strict=True)
        }


class BiasTerms(NamedTuple):
    """What the bias contributes to the logits of one tile, for any number of batch rows.

    Attributes:
      bias: B, [H, 1, Tq, Tk]; None without a bias.
      hidden: the hidden layer's share of B with b1, [D, 1, Tq, Tk] ([H, D, 1, Tq, Tk] with per_head); None without a
        network, and for kernel_width > 1, where it depends on the mask.
    """

    bias: jax.Array | None
    hidden: jax.Array | None


class Neighbours(NamedTuple):
    """What a network with kernel_width > 1 needs to know of a tile of n keys and the halo around it.

    Attributes:
      allowed: bool [1 or B, Tq, n + 4p], which entries a query may attend to; False beyond the first and last key.
      is_key: bool [1 or B, 1, n + 2p], False beyond the first and last key and on padding.
    """

    allowed: jax.Array
    is_key: jax.Array


def bias_terms(adapt: Adapt | None, params: Params | None, bias: jax.Array | None) -> BiasTerms:
    """Computes everything that does not depend on S. ``bias`` is [H, Tq, Tk] (Tk with the halo) or None."""
    bias = None if bias is None else bias[:, None]
    if adapt is None or params is None or adapt.kernel_width > 1:
        return BiasTerms(bias, None)

    def hidden(params: Params, bias: jax.Array | None) -> jax.Array:
        b1 = params["b1"][:, None, None, None]
        if bias is None:
            return b1
        return mix(bias, _split_w1(adapt, params["w1"][0], has_bias=True)[1]) + b1

    if adapt.per_head:
        in_axes = (0, None if bias is None else 0)
        return BiasTerms(bias, jax.vmap(hidden, in_axes)(params, None if bias is None else bias[:, None]))
    return BiasTerms(bias, hidden(params, bias))


def adapt_logits(
    adapt: Adapt | None,
    params: Params | None,
    logits: jax.Array,
    terms: BiasTerms,
    neighbours: Neighbours | None = None,
) -> jax.Array:
    """The logits that enter the softmax.

    Args:
      adapt: the network, or None for S + B.
      params: its parameters, in the dtype of ``logits``. b2 may be left out: it adds a constant to a whole row, which
        the softmax cancels, so attention that needs no logits skips it and its gradient is exactly zero.
      logits: S, [H, B, Tq, Tk]; with kernel_width > 1 the keys include the halo.
      terms: of ``bias_terms`` for the same queries and keys.
      neighbours: needed with kernel_width > 1.

    Returns:
      A, [H, B, Tq, Tk] without the halo.
    """
    if adapt is None or params is None:
        return logits if terms.bias is None else logits + terms.bias
    if adapt.kernel_width > 1:
        if neighbours is None:
            raise UserError(f"DAPE kernel_width={adapt.kernel_width}: the mask must be given, as neighbours")
        return _convolved_logits(adapt, params, logits, terms.bias, neighbours)

    def network(params: Params, logits: jax.Array, hidden: Any) -> jax.Array:
        if adapt.variant != "bias_only":
            hidden = mix(logits, _split_w1(adapt, params["w1"][0], terms.bias is not None)[0]) + hidden
        return _add_b2(mix(jax.nn.leaky_relu(hidden, SLOPE), params["w2"][0]), params)

    residual = logits if terms.bias is None or adapt.variant == "concat" else logits + terms.bias
    if adapt.per_head:
        return residual + jax.vmap(network)(params, logits[:, None], terms.hidden)[:, 0]
    return residual + network(params, logits, terms.hidden)


def _convolved_logits(
    adapt: Adapt, params: Params, logits: jax.Array, bias: jax.Array | None, neighbours: Neighbours
) -> jax.Array:
    """A of DAPE V2 from S and B with their halo, [H, B, Tq, n + 4p] to [H, B, Tq, n]."""
    allowed = neighbours.allowed[None]
    masked = {"s": jnp.where(jnp.broadcast_to(allowed, logits.shape), logits, 0.0)}
    if bias is not None:
        shape = jnp.broadcast_shapes(bias.shape, allowed.shape)
        masked["b"] = jnp.where(jnp.broadcast_to(allowed, shape), jnp.broadcast_to(bias, shape), 0.0)

    def network(params: Params, s: jax.Array, b: jax.Array | None) -> jax.Array:
        w1_s, w1_b = _split_w1(adapt, params["w1"], b is not None)
        hidden = params["b1"][:, None, None, None]
        if adapt.variant != "bias_only":
            hidden = _convolve(s, w1_s) + hidden
        if b is not None:
            hidden = _convolve(b, w1_b) + hidden
        hidden = jax.nn.leaky_relu(hidden, SLOPE)
        # The second convolution pads with zeros, not with what the first one makes of them.
        hidden = jnp.where(jnp.broadcast_to(neighbours.is_key, hidden.shape), hidden, 0.0)
        return _add_b2(_convolve(hidden, params["w2"]), params)

    if adapt.per_head:
        one_head = {name: x[:, None] for name, x in masked.items()}
        in_axes = (0, 0, None if bias is None else 0)
        correction = jax.vmap(network, in_axes)(params, one_head["s"], one_head.get("b"))[:, 0]
    else:
        correction = network(params, masked["s"], masked.get("b"))
    inner = slice(adapt.halo, logits.shape[-1] - adapt.halo)
    residual = logits[..., inner]
    if bias is not None and adapt.variant != "concat":
        residual = residual + bias[..., inner]
    return residual + correction


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """``y[d, j] = sum_t sum_c w[t, c, d] x[c, j + t]``: [C, B, Tq, m] and [k, C, D] to [D, B, Tq, m - k + 1].

    One product with the taps side by side on the larger of the two channel axes, so that the shifted copies are of
    the smaller one.
    """
    taps, inputs, outputs = w.shape
    n = x.shape[-1] - taps + 1
    if inputs <= outputs:
        return mix(jnp.concatenate([x[..., t : t + n] for t in range(taps)]), w.reshape(taps * inputs, outputs))
    y = mix(x, jnp.moveaxis(w, 0, 1).reshape(inputs, taps * outputs))
    total = y[:outputs, ..., :n]
    for t in range(1, taps):
        total = total + y[t * outputs : (t + 1) * outputs, ..., t : t + n]
    return total


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


def _add_b2(correction: jax.Array, params: Params) -> jax.Array:
    return correction + params["b2"][:, None, None, None] if "b2" in params else correction


def _split_w1(adapt: Adapt, w1: jax.Array, has_bias: bool) -> tuple[jax.Array, jax.Array]:
    """W1's rows for S and for B, each [..., channels, D]; where it reads S + B, or only one, both are the whole."""
    if not has_bias or adapt.variant in ("add_residual", "bias_only"):
        return w1, w1
    half = w1.shape[-2] // 2
    return w1[..., :half, :], w1[..., half:, :]
