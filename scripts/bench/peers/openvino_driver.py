#!/usr/bin/env python3
"""Drives OpenVINO GenAI in its own process, with the prompts, the concurrency and the report of ``serve.py``.

The engine has no server of its own, so there is no HTTP in these figures: they are what its continuous batching does
alone. One thread adds requests and steps the pipeline, as its documentation shows; a closed loop of ``--concurrency``
requests. A token's time is the return of the step that made it. Runs in the peer's environment; uses nothing of
Treadle's services.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from scripts.bench.report import Objective, format_report, make_report
from scripts.bench.serve import WARM_UP_SEED, Load, make_bodies
from scripts.bench.streaming_client import Outcome

Prompt = Sequence[int]


def run_closed_loop(pipeline: Any, prompts: Sequence[Prompt], num_outputs: int, concurrency: int) -> list[Outcome]:
    """Keep so many requests in the pipeline until every prompt was answered.

    Args:
        pipeline: A ``ContinuousBatchingPipeline``; it has no type information.
        prompts: Token ids.
        num_outputs: Tokens of each answer; end of sequence is ignored.
        concurrency: Requests in flight.
    """
    config = openvino_genai.GenerationConfig(max_new_tokens=num_outputs, ignore_eos=True, do_sample=False)
    waiting: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
    running: dict[int, tuple[Any, Outcome]] = {}
    outcomes: list[Outcome] = []
    while True:
        while len(running) < concurrency and (following := next(waiting, None)) is not None:
            number, prompt = following
            outcome = Outcome(sent_s=time.perf_counter(), num_prompt_tokens=len(prompt))
            token_ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            running[number] = (pipeline.add_request(number, token_ids, config), outcome)
        if not running:
            return outcomes
        pipeline.step()
        now_s = time.perf_counter()
        for number, (handle, outcome) in list(running.items()):
            if handle.can_read():
                for output in handle.read().values():
                    outcome.event_s.append(now_s)
                    outcome.num_output_tokens += len(output.generated_ids)
            if outcome.num_output_tokens >= num_outputs:
                outcome.end_s = now_s
                outcomes.append(outcome)
                del running[number]


def main() -> None:
    """Parse the command line, load, warm up, measure, print, and write the JSON file."""
    arguments = _parser().parse_args()
    start_s = time.perf_counter()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = arguments.cache_gib
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(arguments.model), scheduler, "CPU")
    load_s = time.perf_counter() - start_s
    load = Load(
        model=arguments.model.name,
        prompt_kind="ids",
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        first_token_id=1000,
        last_token_id=30_000,
        num_requests=arguments.num_requests,
        num_warm_up=arguments.warm_up,
        concurrency=arguments.concurrency,
        rate=None,
        seed=arguments.seed,
    )
    run_closed_loop(
        pipeline, _prompts(load, load.num_warm_up, load.seed + WARM_UP_SEED), load.output_tokens, load.concurrency
    )
    outcomes = run_closed_loop(
        pipeline, _prompts(load, load.num_requests, load.seed), load.output_tokens, load.concurrency
    )
    # Driver and engine are one process, so there is no CPU time of a client to tell.
    report = make_report(outcomes, load.input_tokens, Objective(), 0.0)
    print(format_report(report))
    if arguments.json is not None:
        document = {"load": asdict(load), "load_s": load_s, "report": report.as_document()}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _prompts(load: Load, count: int, seed: int) -> list[Prompt]:
    return [json.loads(body)["prompt"] for body in make_bodies(load, count, seed)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Drive OpenVINO GenAI with the load of serve.py.")
    parser.add_argument("--model", type=Path, required=True, help="directory of an OpenVINO model, or a GGUF file")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=2, help="KV cache; default: %(default)s")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="of a step; default: the library's 256")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    main()
