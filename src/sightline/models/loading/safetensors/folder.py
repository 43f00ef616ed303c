"""A model in a Hugging Face folder: config.json, generation_config.json and safetensors files.

Finds the files and checks that they belong together. Does not know what the config means, and never unpickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.generation import read_generation_defaults
from sightline.models.loading.safetensors import fp8_blocks, mxfp4
from sightline.models.loading.safetensors.file import SafetensorsFile
from sightline.models.loading.safetensors.packed import PackedFormat, PackedTensor
from sightline.models.loading.text_section import with_text_on_top
from sightline.text.tokenizers.folder import TOKENIZER_FILE, tokenizer_from_folder
from sightline.text.tokenizers.json_file import read_json_object
from sightline.text.tokenizers.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZATION = "quantization_config"
COUNTING_BUFFER = "embeddings.position_ids"
"""A tensor with the numbers 0, 1, 2, … that older encoders store. It is not a weight."""
FORMATS: Mapping[str, Callable[[Mapping[str, object]], PackedFormat]] = MappingProxyType(
    {mxfp4.METHOD: mxfp4.read_section, fp8_blocks.METHOD: fp8_blocks.read_section}
)
"""The supported quantisation formats, by their names in the config."""


class FolderCheckpoint(Checkpoint):
    """A folder. Tensors keep their stored dtype and are mapped from their file.

    Packed tensors are decoded when they are read; `config` and `tensors` describe the unquantised model.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        config, packed_as = read_config(folder / CONFIG_FILE)
        weight_map = _read_index(folder / INDEX_FILE) if (folder / INDEX_FILE).is_file() else {}
        file_names = sorted(set(weight_map.values())) or [_single_file(folder)]
        files = {name: SafetensorsFile(folder / name) for name in file_names}
        _check_index(folder, weight_map, files)
        self._owners = {name: file for file in files.values() for name in file.names}
        self._owners.update({name: files[file] for name, file in weight_map.items()})
        self._owners = {name: file for name, file in self._owners.items() if not name.endswith(COUNTING_BUFFER)}
        self._packed = _take_packed(packed_as, self._owners)
        tensors = {name: file.describe(name) for name, file in self._owners.items()}
        tensors |= {name: packed.describe() for name, packed in self._packed.items()}
        generation = folder / GENERATION_FILE
        super().__init__(
            location=folder,
            config=MappingProxyType(config),
            tensors=MappingProxyType(tensors),
            generation=read_generation_defaults(
                read_json_object(generation) if generation.exists() else {},
                config,
                lambda: _tokenizer_eos(folder),
                ledger,
            ),
        )

    def file_of(self, name: str) -> Path:
        return (self._packed[name].codes if name in self._packed else self._owners[name]).path

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self.location)

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._packed[name].read_packed()

    def _read(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        return self._owners[name].read(name) if packed is None else packed.read()


def read_config(path: Path) -> tuple[dict[str, object], PackedFormat | None]:
    """The config of the unquantised model, and the format of its packed tensors, if it has any."""
    if not path.is_file():
        raise CheckpointError(
            f"expected a folder with {CONFIG_FILE} and *.safetensors, got no {CONFIG_FILE} in {path.parent}. "
            "Give the folder that holds the model itself, or a .gguf file."
        )
    config = with_text_on_top(read_json_object(path))
    section = config.pop(QUANTIZATION, None)
    return config, None if section is None else _read_format(section)


def _read_format(section: object) -> PackedFormat:
    """The format that a `quantization_config` describes. Raises if it is not supported."""
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if not isinstance(section, Mapping) or not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"expected no 'quantization_config', or one of the method {' or '.join(map(repr, FORMATS))}, "
            f"got the method {method!r}: the stored tensors are not the weights themselves. "
            "Use the unquantised model, or a GGUF file."
        )
    return FORMATS[method](section)


def _take_packed(packed_as: PackedFormat | None, owners: dict[str, SafetensorsFile]) -> Mapping[str, PackedTensor]:
    """Finds the packed tensors and removes their parts from `owners`."""
    packed = {} if packed_as is None else packed_as.pair_tensors(owners)
    for part in (part for tensor in packed.values() for part in tensor.parts):
        del owners[part]
    return packed


def _single_file(folder: Path) -> str:
    """The file name of the only weights in a folder without an index."""
    if (folder / WEIGHTS_FILE).is_file():
        return WEIGHTS_FILE
    candidates = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise CheckpointError(
            f"expected {INDEX_FILE} beside {len(candidates)} safetensors files, got none in {folder}: "
            "without it a missing part cannot be noticed. Get the index."
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"expected *.safetensors in {folder}, got only {pickles[0]}: it is a pickle, and opening one can "
            "run any code that its author put there. Get or convert the model as safetensors."
        )
    raise CheckpointError(f"expected *.safetensors in {folder}, got none. Get the weights, or give a .gguf file.")


def _read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object 'weight_map' with entries, got none. Get the file again.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\\" in file:
            raise CheckpointError(
                f"{path}: expected the name of a file in the same folder for {name[:80]!r}, got {str(file)[:80]!r}."
            )
    # Compared with the files that are there: not every text can be looked up as a name.
    missing = sorted(set(weight_map.values()) - {each.name for each in path.parent.iterdir() if each.is_file()})
    if missing:
        raise CheckpointError(
            f"{path}: expected the file {missing[0][:80]!r} beside it, got none. Get the missing part."
        )
    return weight_map


def _check_index(folder: Path, weight_map: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    held = {name: set(file.names) for name, file in files.items()}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: expected {tensor!r} in {file!r}, got a file without it. "
                "The parts are from different versions: get them all again."
            )


def _tokenizer_eos(folder: Path) -> frozenset[int]:
    if not (folder / TOKENIZER_FILE).is_file():
        return frozenset()
    return tokenizer_from_folder(folder).eos_ids
