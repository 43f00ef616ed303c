"""Peers are called as their libraries declare: the operations here have the schemas of vLLM 0.32's binaries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.bench.attention import peers as attention_peers
from sightline.bench.attention.data import build_data
from sightline.bench.attention.flashinfer_peers import PEERS
from sightline.bench.attention.peers import (
    AttentionPeer,
    FlashAttention3Peer,
    FlashAttention4Peer,
    FlashMlaPeer,
    SdpaPeer,
    call,
)
from sightline.bench.attention.shapes import SHAPE_SETS, Shape, find_shapes
from sightline.core.device import detect_device
from sightline.core.errors import SightlineError
from support.dense_attention import attend_dense

CPU = detect_device("cpu")
FORWARD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
DENSE_DECODE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
    "Tensor(c!)? out_) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
)


def _names(schema: str) -> list[str]:
    """Of the arguments."""
    return [part.split()[-1] for part in schema[schema.index("(") + 1 : schema.index(") ->")].split(",")]


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> list[Tensor]:
    """FlashAttention 3's arguments, by place, as attention of one row after the other."""
    given = dict(zip(_names(FORWARD)[3:], rest, strict=True))
    out, offsets = given["out"], given["cu_seqlens_q"]
    assert isinstance(out, Tensor)
    assert isinstance(offsets, Tensor)
    assert given["is_causal"] is True
    assert (given["window_size_left"], given["window_size_right"], given["softcap"]) == (-1, -1, 0.0)
    assert (given["cp_world_size"], given["cp_rank"]) == (1, 0)
    scale, table, q_v = given["softmax_scale"], given["page_table"], given["q_v"]
    assert isinstance(scale, float)
    for row in range(offsets.shape[0] - 1):
        tokens = slice(int(offsets[row]), int(offsets[row + 1]))
        keys, values = k[tokens], v[tokens]
        if isinstance(table, Tensor):
            length = given["seqused_k"]
            assert isinstance(length, Tensor)
            assert isinstance(given["scheduler_metadata"], Tensor)
            keys, values = (part[table[row].long()].flatten(0, 1)[: int(length[row])] for part in (k, v))
        query = q[tokens]
        if isinstance(q_v, Tensor):
            query, keys = torch.cat([query, q_v[tokens]], -1), torch.cat([keys, values], -1)
        out[tokens] = attend_dense(query, keys, values, scale)
    return [out, out.new_zeros(1)]


def _metadata(*arguments: object) -> Tensor:
    given = dict(zip(_names(METADATA), arguments, strict=True))
    assert (given["page_size"], given["max_seqlen_k_new"], given["is_causal"]) == (4, 0, True)
    assert (given["max_seqlen_q"], given["max_seqlen_k"], given["num_splits"]) == (1, 21, 0)
    return torch.zeros(4, dtype=torch.int32)


def _dense_decode(
    q: Tensor,
    entries: Tensor,
    latent_dim: int,
    lengths: Tensor,
    table: Tensor,
    scale: float,
    is_causal: bool,
    metadata: Tensor | None,
    splits: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert out is None
    assert (metadata is None) == (splits is None)
    rows = []
    for row in range(q.shape[0]):
        keys = entries[table[row].long()].flatten(0, 1)[: int(lengths[row])]
        rows.append(attend_dense(q[row], keys, keys[..., :latent_dim], scale))
    planned = torch.zeros(1, dtype=torch.int32)
    return torch.stack(rows), q.new_zeros(1), planned.clone(), planned.clone()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations of those names on the CPU, in place of the libraries'."""
    monkeypatch.setattr(attention_peers, "_load_library", lambda file: None)
    library: Any = torch.library
    flash = library.Library("_vllm_fa3_C", "DEF")
    flash.define(FORWARD)
    flash.define(METADATA)
    flash.impl("fwd", _forward, "CPU")
    flash.impl("get_scheduler_metadata", _metadata, "CPU")
    latent = library.Library("_flashmla_C", "DEF")
    latent.define(DENSE_DECODE)
    latent.impl("dense_decode_fwd", _dense_decode, "CPU")
    yield
    flash._destroy()
    latent._destroy()


@pytest.mark.parametrize("shape", SHAPE_SETS["tiny"], ids=lambda shape: shape.name)
@pytest.mark.parametrize("peer", [FlashAttention3Peer(), FlashMlaPeer()], ids=lambda peer: peer.name)
@pytest.mark.usefixtures("libraries")
def test_a_library_is_given_what_its_schema_says(peer: AttentionPeer, shape: Shape) -> None:
    if (shape.spec.kind, shape.row_kind) not in peer.forms:
        assert peer.refuses(shape, CPU) is not None
        return
    data = build_data(shape, CPU, 2)
    contender = peer.build(data)
    data.forget()
    contender.layer(0)
    assert data.error(contender.layer(1)) < data.tolerance
    assert contender.kernel is not None
    contender.kernel(1)


@pytest.mark.usefixtures("libraries")
def test_a_library_of_another_version_says_what_it_takes() -> None:
    with pytest.raises(SightlineError, match=r"the library has _flashmla_C::dense_decode_fwd\(Tensor q, Tensor kcache"):
        call(torch.ops._flashmla_C.dense_decode_fwd, torch.zeros(1))


@pytest.mark.parametrize(
    ("peer", "file"), [(FlashAttention3Peer(), "_vllm_fa3_C.abi3.so"), (FlashMlaPeer(), "_flashmla_C.abi3.so")]
)
def test_a_shared_library_is_looked_for_on_the_import_path(
    peer: AttentionPeer, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert peer.missing() == f"no {file} in a folder of PYTHONPATH"
    with pytest.raises(SightlineError, match=f"expected {file} in a folder"):
        attention_peers._load_library(file)
    (tmp_path / file).touch()
    assert peer.missing() is None


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for module in [name for name in sys.modules if name.split(".")[0] in ("flashinfer", "flash_attn")]:
        monkeypatch.delitem(sys.modules, module)
    packages = [peer for peer in PEERS if not isinstance(peer, FlashAttention3Peer | FlashMlaPeer | SdpaPeer)]
    assert len(packages) == 5
    for peer in packages:
        reason = peer.missing()
        assert reason is not None
        wanted = "flash_attn.cute" if isinstance(peer, FlashAttention4Peer) else "flashinfer"
        assert f"package {wanted} is not installed: pip install" in reason


def test_peers_have_names_of_their_own_and_serve_every_shape() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for shape in find_shapes(["decode", "prefill"]):
        serving = [peer for peer in PEERS if (shape.spec.kind, shape.row_kind) in peer.forms]
        assert len(serving) >= 2


def test_what_a_peer_does_not_serve_is_said() -> None:
    decode, prefill = SHAPE_SETS["tiny"][0], SHAPE_SETS["tiny"][3]
    flash = next(peer for peer in PEERS if peer.name == "sdpa flash")
    assert flash.refuses(decode, CPU) == "does not serve softmax decode"
    assert flash.refuses(prefill, CPU) == "does not support values that are shorter than keys"
    assert FlashMlaPeer().refuses(decode, CPU) == "does not run on cpu"
