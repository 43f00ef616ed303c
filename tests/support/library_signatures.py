"""The public signatures of library functions that stand-ins replace: as recorded here, in source, and of a function.

A signature is the list of its parameters, `name` or `name=default`, with `*` before those that must be named.
`SIGHTLINE_WHEELS` names a folder with wheels of the libraries, from `pip download --no-deps`; without it, an installed
library of the recorded version is read.
"""

from __future__ import annotations

import ast
import inspect
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "SIGHTLINE_WHEELS"


@dataclass(frozen=True)
class LibraryFunction:
    """A function of a library, as its version is recorded."""

    distribution: str
    version: str
    path: str
    """The source file inside of the wheel."""
    name: str
    parameters: tuple[str, ...]

    def source(self) -> str | None:
        """The text of its source file; None if the recorded version is not at hand."""
        folder = os.environ.get(VARIABLE)
        stem = f"{self.distribution.replace('-', '_')}-{self.version}-"
        for wheel in sorted(Path(folder).glob(f"{stem}*.whl")) if folder else ():
            return zipfile.ZipFile(wheel).read(self.path).decode()
        try:
            installed = metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            return None
        return Path(str(installed.locate_file(self.path))).read_text() if installed.version == self.version else None


def of_source(text: str, name: str) -> tuple[str, ...]:
    """The signature of a function at the top of a module."""
    [found] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    arguments = found.args
    listed = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first = len(listed) - len(arguments.defaults)
    for place, default in enumerate(arguments.defaults):
        listed[first + place] += f"={ast.unparse(default)}"
    if arguments.kwonlyargs:
        listed.append("*")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        listed.append(argument.arg if value is None else f"{argument.arg}={ast.unparse(value)}")
    return tuple(listed)


def of_function(function: Callable[..., Any]) -> tuple[str, ...]:
    """The signature of a function that was imported."""
    listed, names_begin = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not names_begin:
            listed.append("*")
            names_begin = True
        has_default = parameter.default is not parameter.empty
        listed.append(f"{parameter.name}={parameter.default!r}" if has_default else parameter.name)
    return tuple(listed)


BLACKWELL: tuple[LibraryFunction, ...] = (
    LibraryFunction(
        "flashinfer-python",
        "0.7.2.post1",
        "flashinfer/mla/_core.py",
        "trtllm_batch_decode_with_kv_cache_mla",
        (
            "query",
            "kv_cache",
            "workspace_buffer",
            "qk_nope_head_dim",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "block_tables",
            "seq_lens",
            "max_seq_len",
            "sparse_mla_top_k=0",
            "out=None",
            "bmm1_scale=1.0",
            "bmm2_scale=1.0",
            "sinks=None",
            "skip_softmax_threshold_scale_factor=None",
            "enable_pdl=None",
            "backend='auto'",
            "is_var_seq=True",
            "uses_shared_paged_kv_idx=True",
            "lse=None",
            "return_lse=False",
            "cute_dsl_impl='auto'",
            "kv_scale_format='auto'",
            "cum_seq_lens_q=None",
            "max_q_len=None",
            "multi_ctas_kv_counter_buffer=None",
            "sparse_mla_top_k_lens=None",
            "enable_dcp=False",
            "cp_world=1",
            "cp_rank=0",
            "causal_seqlens_kv_global=None",
            "use_fp16_softmax=None",
            "return_lse_base=None",
        ),
    ),
    LibraryFunction(
        "flashinfer-python",
        "0.7.2.post1",
        "flashinfer/prefill.py",
        "trtllm_ragged_attention_deepseek",
        (
            "query",
            "key",
            "value",
            "workspace_buffer",
            "seq_lens",
            "max_q_len",
            "max_kv_len",
            "bmm1_scale",
            "bmm2_scale",
            "o_sf_scale",
            "batch_size",
            "window_left",
            "cum_seq_lens_q",
            "cum_seq_lens_kv",
            "enable_pdl",
            "is_causal",
            "return_lse",
            "attention_sinks=None",
            "skip_softmax_threshold_scale_factor=None",
            "out=None",
            "lse=None",
            "sage_attn_sfs=(None, None, None, None)",
            "num_elts_per_sage_attn_blk=(0, 0, 0, 0)",
            "backend='trtllm-gen'",
            "q_seq_lens_cpu=None",
            "kv_seq_lens_cpu=None",
            "use_fp16_softmax=None",
            "uses_spcompress=None",
            "skip_all_rows_active_check=True",
        ),
    ),
    LibraryFunction(
        "flashinfer-python",
        "0.7.2.post1",
        "flashinfer/prefill.py",
        "trtllm_batch_context_with_kv_cache",
        (
            "query",
            "kv_cache",
            "workspace_buffer",
            "block_tables",
            "seq_lens",
            "max_q_len",
            "max_kv_len",
            "bmm1_scale",
            "bmm2_scale",
            "batch_size",
            "cum_seq_lens_q",
            "cum_seq_lens_kv",
            "window_left=-1",
            "out=None",
            "out_dtype=None",
            "o_sf_scale=None",
            "o_sf_vec_size=None",
            "kv_layout='HND'",
            "enable_pdl=None",
            "sinks=None",
            "kv_cache_sf=None",
            "skip_softmax_threshold_scale_factor=None",
            "uses_shared_paged_kv_idx=True",
            "causal=True",
            "lse=None",
            "return_lse=False",
            "multi_ctas_kv_counter_buffer=None",
            "use_fp16_softmax=None",
            "uses_spcompress=None",
            "backend='trtllm-gen'",
        ),
    ),
    LibraryFunction(
        "flashinfer-python",
        "0.7.2.post1",
        "flashinfer/decode.py",
        "trtllm_batch_decode_with_kv_cache",
        (
            "query",
            "kv_cache",
            "workspace_buffer",
            "block_tables",
            "seq_lens",
            "max_seq_len",
            "bmm1_scale=1.0",
            "bmm2_scale=1.0",
            "window_left=-1",
            "out=None",
            "out_dtype=None",
            "o_sf_scale=None",
            "o_sf_vec_size=None",
            "sinks=None",
            "kv_layout='HND'",
            "enable_pdl=None",
            "backend='auto'",
            "q_len_per_req=1",
            "o_scale=1.0",
            "mask=None",
            "max_q_len=None",
            "cum_seq_lens_q=None",
            "skip_softmax_threshold_scale_factor=None",
            "kv_cache_sf=None",
            "uses_shared_paged_kv_idx=True",
            "lse=None",
            "return_lse=False",
            "bmm1_scale_log2=None",
            "multi_ctas_kv_counter_buffer=None",
            "enable_block_sparse_attention=False",
            "cp_world=1",
            "cp_rank=0",
            "causal_seqlens_kv_global=None",
            "bf16q_fp8kv_transform_mode=None",
            "request_order=None",
            "request_order_plan=None",
        ),
    ),
    LibraryFunction(
        "tokenspeed-mla",
        "2.0.4",
        "tokenspeed_mla/mla_decode.py",
        "tokenspeed_mla_decode",
        (
            "query",
            "kv_cache",
            "workspace_buffer",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "block_tables",
            "seq_lens",
            "max_seq_len",
            "softmax_scale",
            "output_scale=1.0",
            "out=None",
            "is_var_seq=True",
            "causal_mask=True",
            "window_left=-1",
            "enable_pdl=False",
            "return_lse=False",
            "causal_seqs=None",
            "cp_world=1",
            "cp_rank=0",
            "cp_interleave_size=1",
            "*",
            "min_split_kv=1",
            "local_visible_lens=None",
        ),
    ),
)
