"""Measure seconds per step over slow links. This program must run as root.

    python results/lab/slow_links.py FILE.json [--rates 2 10]

Two processes run in network namespaces on one machine. Rates are in Mbit/s in each direction. The
cases are a subset of the cases in exchanges.py, which measures their losses. The network interface
of the first process counts the bytes, including headers and acknowledgments. The published time is
the time of the fastest round. On a busy machine, this time is meaningful only if the link accounts
for most of it. The table omits times that are not meaningful.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout

from distributed_training.parallel.agree import gather
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from results.lab.exchanges import PLAN
from results.lab.harness import Run, each_accepted_run, open_group

CASES = ("`dp`", "bf16", "PowerSGD, rank 4", "top-k int8, k 0.01", "local SGD, H 8")
ROUNDS = 3
STEPS_PER_ROUND = 8  # with one exchange of local SGD, H 8
WARMUP_STEPS = 8
MIN_LINK_SHARE = 0.5  # Publish a time only if the link takes at least this share of the step.
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
SCRIPT = Path(__file__).with_name("slow_link.sh")


def time_rounds(run: Run) -> dict[str, Any]:
    """Return the seconds per step in each round, and the number of bytes that this process's
    interface sent per step, averaged over all rounds. Both processes must call this function."""
    for step in range(WARMUP_STEPS):
        run.engine.train_step(run.batch(step))
    gather(None)
    seconds = []
    before = int(COUNTER.read_text())
    step = WARMUP_STEPS
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            run.engine.train_step(run.batch(step))
            step += 1
        seconds.append((time.perf_counter() - began) / STEPS_PER_ROUND)
    counted = (int(COUNTER.read_text()) - before) / (ROUNDS * STEPS_PER_ROUND)
    by_formula = sum(sent_by_axis(run.plan).values())
    return {"round_s": seconds, "counted_bytes": counted, "formula_bytes": by_formula}


def summarize(rates: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return one row per case. A row contains the KiB per step and, for each rate, the seconds per
    step in the fastest round and the link's share of this time. The time and the share are None if
    the share is below `MIN_LINK_SHARE`."""
    rows: dict[str, dict[str, float | None]] = {}
    for rate, cases in rates.items():
        for name, measured in cases.items():
            kib = measured["counted_bytes"] / 2**10
            row = rows.setdefault(name, {"KiB a step": kib})
            seconds = min(measured["round_s"])
            share = measured["counted_bytes"] / (float(rate) * 1e6 / 8) / seconds
            publish = share >= MIN_LINK_SHARE
            row[f"s at {rate} Mbit/s"] = seconds if publish else None
            row[f"link's share at {rate}"] = share if publish else None
    return rows


def measure_cases(out: Path, rate: str) -> None:
    """Measure all cases at one rate. Both processes must call this function."""
    cases = {name: {**PLAN["common"], "seed": 1, **PLAN["cases"][name]} for name in CASES}
    with open_group() as group:
        results = {}
        for name, ranks in each_accepted_run(group, cases, time_rounds):
            results[name] = ranks[0]
            if group.process.rank == 0:
                print(f"{rate} Mbit/s  {name}: {ranks[0]}", flush=True)
        if group.process.rank == 0:
            old_record = load_json(out, "record") if out.exists() else {}
            rates = {**old_record.get("rates", {}), rate: results}
            record = {
                "what": "seconds per step of gpt2-tiny on two processes over a link of the given "
                "Mbit/s each way (network namespaces, veth, tc tbf), gloo, one thread each, on "
                "two cores that other programs also used",
                **provenance("python results/lab/slow_links.py OUT.json"),
                "base": PLAN["common"],
                "cases": {name: PLAN["cases"][name] for name in CASES},
                "steps": {"warm_up": WARMUP_STEPS, "rounds": ROUNDS, "a_round": STEPS_PER_ROUND},
                "load_average": os.getloadavg()[0],
                "seconds_a_step": summarize(rates),
                "rates": rates,
            }
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Start two processes for each rate, or act as one of these processes."""
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--rates", nargs="+", default=["2", "10"], help="link rates in Mbit/s in each direction"
    )
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure_cases(options.out, options.rates[0])
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        what = "network namespaces need root and the programs ip and tc"
        raise UserError(what, fix="use sudo, and install iproute2")
    for rate in options.rates:
        # Use a small token bucket, because as many bytes as it holds pass without delay.
        command = ["bash", str(SCRIPT), f"{rate}mbit", str(Path(__file__))]
        command += [str(options.out.resolve()), "--rates", rate]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "BURST": "32kb"}).returncode
        if code:
            return code
    print(f"Wrote {options.out}.")
    return 0


if __name__ == "__main__":
    checkout.run(main)
