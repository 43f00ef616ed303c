"""The definition of several residual streams, and how checkpoints store their connections.

    model.layers.N.attn_hc.fn, base, scale     how attention reads the streams and adds to them
    model.layers.N.ffn_hc.fn, base, scale      the same for the feed-forward
    model.hc_head.hc_fn, hc_base, hc_scale     how the streams are joined behind the last layer

All are kept in fp32. Does not know model families.
"""

from __future__ import annotations

import torch

from sightline.layers.stream_mix import StreamMix, StreamRule
from sightline.layers.streams import StreamConnection, StreamHead
from sightline.models.weights import WeightReader

HEAD = "model.hc_head"
JOINED_SCALES, CONNECTED_SCALES = 1, 3


def load_connection(rule: StreamRule, weights: WeightReader, prefix: str, hidden_size: int) -> StreamConnection:
    """Loads how a part of a layer is connected to the streams."""
    fn, base, scale = (f"{prefix}.{name}" for name in ("fn", "base", "scale"))
    logits = weights.take(fn, (rule.num_logits, rule.count * hidden_size), torch.float32)
    mix = StreamMix(
        rule,
        scale=weights.take(scale, (CONNECTED_SCALES,), torch.float32),
        base=weights.take(base, (rule.num_logits,), torch.float32),
    )
    return StreamConnection(weights.make_linear(logits, None), mix)


def load_head(rule: StreamRule, weights: WeightReader, hidden_size: int) -> StreamHead:
    """Loads how the streams are joined."""
    fn, base, scale = (f"{HEAD}.hc_{name}" for name in ("fn", "base", "scale"))
    logits = weights.take(fn, (rule.count, rule.count * hidden_size), torch.float32)
    mix = StreamMix(
        rule,
        scale=weights.take(scale, (JOINED_SCALES,), torch.float32),
        base=weights.take(base, (rule.count,), torch.float32),
    )
    return StreamHead(weights.make_linear(logits, None), mix)


def num_stream_weights(rule: StreamRule, hidden_size: int) -> int:
    """Weights of a layer that each token is multiplied with."""
    return 2 * rule.num_logits * rule.count * hidden_size
