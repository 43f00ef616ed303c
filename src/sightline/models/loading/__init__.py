"""Models on disk: opening a Hugging Face folder, id or GGUF file as one kind of `Checkpoint`.

open_checkpoint ─┬─ hub: an id becomes a folder or a file in the usual cache
                 ├─ FolderCheckpoint ── SafetensorsFile, mxfp4
                 └─ GgufCheckpoint ── GgufFile, gguf_config and gguf_families, gguf_names and gguf_layouts,
                                      gguf_quantization
"""

from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.opening import open_checkpoint

__all__ = ["Checkpoint", "GenerationDefaults", "TensorInfo", "default_model_path", "open_checkpoint"]
