"""Models on disk: a Hugging Face folder, a Hugging Face id or a GGUF file, each opened as a `Checkpoint`.

open_checkpoint ─┬─ hub: downloads an id to a folder or a file in the usual cache
                 ├─ safetensors: FolderCheckpoint ── SafetensorsFile, mxfp4, fp8_blocks
                 └─ gguf: GgufCheckpoint ── GgufFile, config, families, names, layouts, quantization
"""
