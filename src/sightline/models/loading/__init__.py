"""Models on disk: opening a Hugging Face folder or a GGUF file as one kind of `Checkpoint`.

open_checkpoint ─┬─ FolderCheckpoint ── SafetensorsFile
                 └─ GgufCheckpoint ── GgufFile, gguf_config, gguf_names, gguf_quantization
"""

from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.generation import GenerationDefaults
from sightline.models.loading.opening import open_checkpoint

__all__ = ["Checkpoint", "GenerationDefaults", "TensorInfo", "default_model_path", "open_checkpoint"]
