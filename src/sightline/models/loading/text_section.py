"""The config of the text network of a model that also takes images, as if it were a model of its own.

Such a config has a section for each network. The text network computes the same without the others as long as a prompt
has no images. Does not know tensors: those of the other networks are left where the text network is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

SECTION = "text_config"
MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Models whose text network is served without the others."""


def with_text_on_top(config: Mapping[str, object]) -> dict[str, object]:
    """The config with the fields of its text section in place of the section, if it is of one of `MODEL_TYPES`.

    If both have a field, the text network reads that of its section. The output projection is not part of that network:
    whether it is the embedding is stated outside.
    """
    section = config.get(SECTION)
    if str(config.get("model_type")) not in MODEL_TYPES or not isinstance(section, Mapping):
        return dict(config)
    outer = {name: value for name, value in config.items() if name != SECTION}
    stays = {name: outer[name] for name in ("architectures", "tie_word_embeddings") if name in outer}
    return {**outer, **section, **stays}
