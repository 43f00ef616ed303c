"""The peers that there are. Knows them by name, and nothing else about them."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from sightline.tools.attention_peers import (
    AttentionPeer,
    FlashAttention3Peer,
    FlashAttention4Peer,
    FlashMlaPeer,
    SdpaPeer,
)
from sightline.tools.attention_peers_flashinfer import (
    FlashInferDecodePeer,
    FlashInferLatentPeer,
    FlashInferPagedPeer,
    FlashInferRaggedPeer,
)

PEERS: tuple[AttentionPeer, ...] = (
    FlashInferDecodePeer(),
    FlashInferLatentPeer("fa3"),
    FlashInferRaggedPeer("fa3"),
    FlashInferPagedPeer("fa3"),
    FlashAttention3Peer(),
    FlashAttention4Peer(),
    FlashMlaPeer(),
    SdpaPeer("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
    SdpaPeer("sdpa flash", SDPBackend.FLASH_ATTENTION),
)
