"""Reads a model's files: what the model looks like, what it will cost in memory, and its tensors as a stream.

Loading has three phases, so that a model that cannot run is refused before anything large is read:

1. ``open_checkpoint(path)`` reads metadata only and refuses what it does not understand (unknown architectures, rotary
   rules, tensor types; missing, surplus or wrongly shaped tensors; damaged files).
2. ``checkpoint.memory_plan(dtype).check(available_bytes)`` says what loading takes, before it is taken.
3. ``checkpoint.tensors(dtype, on_progress)`` yields one tensor at a time; there are never two copies of a model.

Two formats are read: a Hugging Face directory (``hf_directory``) and a GGUF file (``gguf_file``). Both meet in
``layout``, the list of the tensors that a :class:`~services.worker.model_config.ModelConfig` implies.
"""

from services.worker.weights.checkpoint import Checkpoint, open_checkpoint
from services.worker.weights.memory_plan import MemoryPlan
from services.worker.weights.progress import ProgressCallback

__all__ = ["Checkpoint", "MemoryPlan", "ProgressCallback", "open_checkpoint"]
