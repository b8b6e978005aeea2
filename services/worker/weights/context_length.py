"""How many positions a model can use, given its rotary embedding."""

from services.worker.model_config import RopeConfig


def usable_length(rope: RopeConfig, declared_length: int) -> int:
    """Tell the longest prompt plus output.

    A model extended with YaRN often still declares the length that it was trained with (as Qwen's instructions for long
    context do); its usable length is then the stretched one. The other rules leave the declared length as it is.

    Args:
        rope: Rotary embedding.
        declared_length: ``max_position_embeddings`` or ``context_length``.
    """
    if rope.scaling == "yarn" and rope.original_max_position is not None:
        return max(declared_length, int(rope.original_max_position * rope.factor))
    return declared_length
