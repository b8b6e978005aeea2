"""`treadle replay --policy NAME DIR`: the recorded arrivals under other policies, beside what was recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.scheduler.core.policies import DEFAULT_POLICY, PolicyName
from services.scheduler.plan_log.workload import Arrival, Timeline, Workload
from services.scheduler.plan_log.workload_reader import read_workload
from services.scheduler.replay.latencies import latency_table
from services.scheduler.replay.simulation import ArrivalSimulation
from services.scheduler.replay.step_time import fit_step_time


def compare_policies(directory: Path, policies: Sequence[PolicyName]) -> str:
    """Simulate a log's newest workload under each policy; return tables of latencies, the recorded ones among them.

    Raises:
        EngineError: PLAN_LOG_BROKEN, or REPLAY_REFUSED when the log holds no workload.
    """
    workload = read_workload(directory)
    step_time = fit_step_time(workload.steps)
    own = workload.policy or DEFAULT_POLICY  # its ageing and its weights hold under every policy
    outcomes: dict[str, Sequence[Timeline | None]] = {
        f"recorded{_policy_of(workload)}": [arrival.timeline for arrival in workload.arrivals],
        **{
            f"simulated {policy}": ArrivalSimulation(workload, replace(own, policy=policy), step_time).run()
            for policy in policies
        },
    }
    model = (
        f"step time: {step_time.base_us / 1000:.2f} ms + {step_time.prefill_token_us / 1000:.3f} ms a prefill token + "
        f"{step_time.decode_row_us / 1000:.3f} ms a decoding row; off by {step_time.typical_error(workload.steps):.0%} "
        f"in the median of {len(workload.steps)} steps"
    )
    return "\n".join([_describe(workload), model, "latencies in ms", *_tables(workload.arrivals, outcomes)])


def _policy_of(workload: Workload) -> str:
    return "" if workload.policy is None else f" {workload.policy.policy}"


def _describe(workload: Workload) -> str:
    text = f"{len(workload.arrivals)} requests on {len(workload.workers)} workers"
    return text if not workload.num_left_out else f"{text}; {workload.num_left_out} without a recorded end left out"


def _tables(arrivals: Sequence[Arrival], outcomes: Mapping[str, Sequence[Timeline | None]]) -> list[str]:
    """Return a table of all requests, then one a class and tenant when there are several."""
    groups = sorted({_group(arrival) for arrival in arrivals})
    tables = [latency_table({name: _ended(timelines) for name, timelines in outcomes.items()})]
    for group in groups if len(groups) > 1 else ():
        members = [index for index, arrival in enumerate(arrivals) if _group(arrival) == group]
        sets = {name: _ended([timelines[index] for index in members]) for name, timelines in outcomes.items()}
        tables.append(f"\nclass {group[0]}, tenant {group[1] or '-'}\n{latency_table(sets)}")
    return tables


def _group(arrival: Arrival) -> tuple[str, str]:
    return arrival.submission.priority.value, arrival.submission.tenant


def _ended(timelines: Sequence[Timeline | None]) -> list[Timeline]:
    return [timeline for timeline in timelines if timeline is not None]
