"""Where the documents lie within packed windows."""

import jax
import jax.numpy as jnp

PACKINGS = ("stream", "segments")
"""Windows read as one stream, or attention kept within each document."""


def segments(tokens: jax.Array, end_of_document: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What keeps the documents of a window apart.

    Args:
      tokens: int32 [..., T], the window's inputs; a document ends with ``end_of_document``, which belongs to it.
      end_of_document: the id.

    Returns:
      segment_ids: int32 [..., T], 0 for the window's first document, 1 for its second, and so on.
      positions: int32 [..., T], from 0 at each document's first token, and at the window's first.
      weights: float32 [..., T], 1 where the next token continues the same document, 0 where it begins another.
    """
    is_end = tokens == end_of_document
    ends = is_end.astype(jnp.int32)
    segment_ids = jnp.cumsum(ends, axis=-1) - ends
    index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    starts = jnp.concatenate([jnp.ones_like(is_end[..., :1]), is_end[..., :-1]], axis=-1)
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=tokens.ndim - 1)
    return segment_ids, index - first, (~is_end).astype(jnp.float32)
