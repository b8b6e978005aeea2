"""Which request fields of the OpenAI API and its usual extensions are known, and which of them are served.

A field that is known and not served is accepted with the values listed here, which clients send by habit and which ask
for nothing; anything else in it is refused by name. Null is neutral everywhere. A field in neither list is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of one request form.

    Attributes:
        served: Read by ``openai_schema.py``.
        neutral_values: By name, the values of fields that are not served that ask for nothing.
    """

    served: frozenset[str]
    neutral_values: Mapping[str, tuple[object, ...]]


_SERVED = frozenset(
    {
        "model",
        "request_id",
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",  # a hint where to look; the one prefix cache there is finds the prefix by its content
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "stream",
        "stream_options",
        "skip_special_tokens",
        "add_special_tokens",
        "return_token_ids",
        "timeout",
        "priority",
    }
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # how many answers
    "best_of": (1,),
    "use_beam_search": (False,),
    # how tokens are drawn
    "min_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    # what form the answer has
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    # what else is reported
    "prompt_logprobs": (),
    "echo": (False,),
    "spaces_between_special_tokens": (True,),
    # what the prompt is made of
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "cache_salt": (),
    "lora_path": (),
    "lora": ([],),
    "kv_transfer_params": (),
    # who goes first; OpenAI's tiers are a matter of contracts
    "service_tier": ("auto", "default"),
}

CHAT_FIELDS = KnownFields(
    served=_SERVED | {"messages", "add_generation_prompt"},
    neutral_values={**_NEUTRAL, "logprobs": (False,), "top_logprobs": (0,)},
)
COMPLETION_FIELDS = KnownFields(
    served=_SERVED | {"prompt"},
    # 0 asks for the logprob of the token itself, so that only absence is neutral
    neutral_values={**_NEUTRAL, "logprobs": (), "top_logprobs": (0,), "suffix": ("",)},
)
