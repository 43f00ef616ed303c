"""A type checker must refuse each marked line and accept the others."""

from sightline import LLM, SamplingParams

LLM()
LLM("folder", dtype="float32", max_model_len=4096, prefix_caching=None, memory_fraction=0.5, strict=True)
LLM(model="folder", context_length=4096, enable_prefix_caching=True, disable_radix_cache=False, tp=1)
LLM("folder", "float32")  # refused: only the model goes without a keyword
LLM(max_model_len="4096")  # refused: not a number
LLM(context_length="4096")  # refused: not a number
LLM(n_ctx=4096)  # refused: no setting
LLM(temperature=0.5)  # refused: a sampling parameter
SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, max_tokens=None)
SamplingParams(max_new_tokens=5)  # refused: no parameter
SamplingParams(top_k=0.5)  # refused: not a whole number
