"""The peers that there are. Knows them by name, and nothing else about them."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from sightline.bench.attention.flashinfer_peers import (
    FlashInferDecodePeer,
    FlashInferLatentPeer,
    FlashInferPagedPeer,
    FlashInferRaggedPeer,
)
from sightline.bench.attention.peers import (
    AttentionPeer,
    FlashAttention3Peer,
    FlashAttention4Peer,
    FlashMlaPeer,
    SdpaPeer,
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
