"""The names that users of other engines give to things. Does not know the settings: the caller names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType


def _by_word(table: str) -> Mapping[str, str]:
    """A table of lines `meaning: words` by word."""
    lines = (line.split(": ") for line in table.strip().splitlines())
    return MappingProxyType({word: meaning for meaning, words in lines for word in words.split()})


MEANINGS = _by_word("""
model: model_path model_id model_name_or_path pretrained_model_name_or_path hf_model repo_id
task: is_embedding embedding embeddings pooling
device: device_map n_gpu_layers gpu_layers ngl main_gpu use_gpu
dtype: torch_dtype precision compute_dtype
quantization: load_in_8bit load_in_4bit quantization_config quantize
max_model_len: n_ctx num_ctx ctx_size max_seq_len max_seq_length max_context_len max_input_length model_max_length
max_num_seqs: max_batch_size batch_size n_parallel parallel np max_concurrency max_concurrent_requests
max_num_batched_tokens: n_batch n_ubatch ubatch_size max_prefill_tokens enable_chunked_prefill
cache_tokens: max_total_tokens max_batch_total_tokens num_gpu_blocks_override num_gpu_blocks
kv_cache_dtype: cache_type_k cache_type_v type_k type_v kv_cache_type
memory_fraction: mem_fraction max_memory kv_cache_memory_bytes
prefix_caching: cache_prompt prompt_cache disable_prefix_caching no_enable_prefix_caching
host_cache_gib: enable_hierarchical_cache hicache_ratio kv_offloading_backend cpu_bytes_to_use max_local_cpu_size
data_parallel_size: enable_dp_attention data_parallel_size_local
enable_expert_parallel: ep_size expert_parallel_size enable_ep_moe enable_eplb
max_queued_requests: max_queue_size max_waiting_requests
cuda_graph_sizes: cuda_graph_max_bs cudagraph_num_of_warmups max_cudagraph_capture_size
tool_call_parser: enable_auto_tool_choice tool_parser tool_parser_plugin jinja
reasoning_parser: enable_reasoning reasoning_format reasoning_budget
speculative_config: draft_model model_draft assistant_model prompt_lookup_num_tokens draft_max draft_min
attention_backend: attn_implementation attn_backend flash_attn use_flash_attention_2
max_tokens: max_new_tokens n_predict num_predict max_length max_output_tokens max_completion_tokens max_gen_len
min_tokens: min_new_tokens min_length
temperature: do_sample temp greedy
repetition_penalty: repeat_penalty rep_pen
stop: stop_strings stop_sequences stop_words stopping_criteria reverse_prompt
stop_token_ids: eos_token_id eos_token_ids stop_tokens
ignore_eos: no_eos ban_eos_token
logit_bias: sequence_bias suppress_tokens
bad_words: bad_words_ids no_bad_words
structured_outputs: guided_json guided_regex guided_choice guided_grammar guided_decoding response_format json_schema
logprobs: output_scores output_logits return_logprob top_logprobs top_logprobs_num n_probs
n: num_return_sequences num_samples best_of
""")
"""Words of vLLM, SGLang, llama.cpp and transformers, and the name here that is nearest in meaning."""
UNSUPPORTED = _by_word("""
beam search outside LLM.beam_search: num_beams beam_width use_beam_search length_penalty early_stopping num_beam_groups
layers on several devices: pipeline_parallel_size pp_size tensor_split nnodes
compiled models: compilation_config torch_compile enable_torch_compile
this way to guess tokens: speculative_token_map speculative_ngram_branch_length speculative_ngram_match_type
LoRA: enable_lora lora_path lora_paths lora_modules max_loras lora lora_request
offloading to the host: cpu_offload_gb swap_space offload_folder
this way of sampling: typical_p top_a top_n_sigma mirostat xtc_probability no_repeat_ngram_size dry_multiplier
custom processing of logits: logits_processors logits_processor custom_logit_processor
another tokenizer: tokenizer tokenizer_mode tokenizer_path tokenizer_revision
images and sound: limit_mm_per_prompt mm_processor_kwargs mmproj
""")
"""Words for what Sightline does not do yet, by feature."""
REFUSED = MappingProxyType(
    {
        "trust_remote_code": "is not supported: code that comes with a model is never run; leave it out",
    }
)
"""Words with an answer of their own."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Known names that are nearest in meaning: by the table, then those with the most words in common.

    Letters only count for a slip of the keyboard.
    """
    listed = list(known)
    if name in MEANINGS:
        return [MEANINGS[name]]
    slips = get_close_matches(name, listed, n=1, cutoff=0.88)
    words = set(name.split("_")) - {"max", "min", "num", "size", "enable", "disable", "use", "no"}
    shared = {each: len(words & set(each.split("_"))) for each in listed}
    return slips or [each for each in listed if shared[each] == max(shared.values()) > 0][:4]


def answer_unknown(
    name: str, known: Iterable[str], what: str, elsewhere: Mapping[str, str], shown: Callable[[str], str] = str
) -> str:
    """The message for a name that is not `known`: the name first, then those that are nearest in meaning, as `shown`.

    Each known name is `what`; `elsewhere` says what other names are.
    """
    listed = list(known)
    if name in REFUSED:
        return f"{shown(name)} {REFUSED[name]}"
    if name in UNSUPPORTED:
        return f"{shown(name)} is not supported yet: {UNSUPPORTED[name]}"
    if name in elsewhere:
        return f"{shown(name)} is {elsewhere[name]}, not {what}"
    found = nearest(name, listed)
    told = ", ".join(shown(each) + ("" if each in listed else f", which is {elsewhere[each]}") for each in found)
    answer = f"nearest: {told}" if found else f"expected {', '.join(map(shown, listed))}"
    return f"{shown(name)} is not {what}; {answer}"
