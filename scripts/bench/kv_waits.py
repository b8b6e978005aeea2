#!/usr/bin/env python3
"""How many steps of a running mesh went by without a request because a block came late from the KV-cache manager.

Sends completions of random prompts, some at a time, then reads the timeline of each: a run of decode steps counts its
steps, ``stalled`` counts those that passed without the request. Standard library only.

Example: scripts/serve & scripts/bench/kv_waits.py --concurrency 8
"""

import argparse
import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def main() -> None:
    """Send the load and print the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=0, help="default: four times as many as at a time")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    options = parser.parse_args()
    model = call(f"{options.base_url}/v1/models")["data"][0]["id"]
    rng = random.Random(0)
    bodies = [
        {
            "model": model,
            "prompt": [rng.randrange(100, 10_000) for _ in range(options.input_tokens)],
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(options.num_requests or 4 * options.concurrency)
    ]
    with ThreadPoolExecutor(options.concurrency) as pool:
        ids = list(pool.map(lambda body: call(f"{options.base_url}/v1/completions", body)["id"], bodies))
    num_decoded = num_stalled = 0
    for request_id in ids:
        for timeline in call(f"{options.base_url}/v1/requests/{request_id}/timeline")["choices"]:
            for event in timeline["events"]:
                if event["type"] == "stalled":
                    num_stalled += event["num_steps"]
                elif event["type"] == "scheduled" and event["kind"] == "decode":
                    num_decoded += event["last_step"] - event["first_step"] + 1
    share = num_stalled / max(1, num_decoded + num_stalled)
    print(f"{len(ids)} requests, {num_decoded:,} decode steps of requests, {num_stalled:,} waited for: {share:.2%}")


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return what a POST of ``body``, or a GET, answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
