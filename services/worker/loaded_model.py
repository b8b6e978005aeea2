"""What loading a model gives, whichever backend it is for."""

from dataclasses import dataclass

from services.worker.device_executor import StepRunner
from services.worker.host_costs import HostCosts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and the facts that the scheduler and clients need.

    Attributes:
        runner: Ready to execute steps.
        name: Name under which the model is served.
        weight_version: Digest of its weights, and names of what was done to them and how they are computed: what gives
            other tokens is another version to prefix caches and replays.
        num_blocks: Blocks of the KV cache, the null block included.
        max_model_len: Longest prompt and output together.
        dtype: Number format of most weights, for people.
        num_host_blocks: Blocks of the host tier.
        host_costs: What restoring and computing cost; None without a host tier.
        max_draft_tokens: Tokens that it may guess for a row and verify in the same step; 0: it does not guess.
    """

    runner: StepRunner
    name: str
    weight_version: str
    num_blocks: int
    max_model_len: int
    dtype: str
    num_host_blocks: int = 0
    host_costs: HostCosts | None = None
    max_draft_tokens: int = 0
