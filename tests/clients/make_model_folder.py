"""Writes the default model as a Hugging Face folder, for clients that read a tokenizer or weights from one.

The weights are those of the GGUF file, dequantised by transformers to float32.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sightline.models.loading.default_model import default_model_path

folder = Path(sys.argv[1])
file = default_model_path()
read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
# transformers does not save a model that it read from a GGUF file.
copy = LlamaForCausalLM(read.config)
copy.load_state_dict(read.state_dict())
if "quantization_config" in vars(copy.config):
    del copy.config.quantization_config
copy.save_pretrained(folder)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
