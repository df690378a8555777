"""Seconds a step over slow links: two processes in network namespaces of one machine; as root.

    python results/lab/slow_links.py FILE.json [--rates 2 10]

The cases are those of exchanges.py, whose losses are by step; rates are in Mbit/s each way.
Bytes are what the interface of the first process counted, headers and acknowledgments included. A
time is the shortest round's, and says something on a busy machine only where the link takes most of
it: others are left out of the table.
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
from distributed_training.tools.harness import Run, every_run, open_group
from results.lab.exchanges import PLAN

CASES = ("`dp`", "bf16", "PowerSGD, rank 4", "top-k int8, k 0.01", "local SGD, H 8")
ROUNDS = 3
STEPS_A_ROUND = 8  # with one exchange of local SGD, H 8
WARM_UP = 8
MOST = 0.5  # of a step, which the link has to take for the step's time to be published
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
SCRIPT = Path(__file__).with_name("slow_link.sh")


def time_rounds(run: Run) -> dict[str, Any]:
    """Seconds a step of each round, and bytes a step that this process's interface sent, all
    rounds together. Collective."""
    for step in range(WARM_UP):
        run.engine.train_step(run.batch(step))
    gather(None)
    seconds = []
    before = int(COUNTER.read_text())
    step = WARM_UP
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            run.engine.train_step(run.batch(step))
            step += 1
        seconds.append((time.perf_counter() - began) / STEPS_A_ROUND)
    counted = (int(COUNTER.read_text()) - before) / (ROUNDS * STEPS_A_ROUND)
    by_formula = sum(sent_by_axis(run.plan).values())
    return {"round_s": seconds, "counted_bytes": counted, "formula_bytes": by_formula}


def summarize(rates: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """A row a case: bytes, and by rate the shortest round's seconds a step with the share of them
    that the counted bytes alone take; None where that is less than `MOST`."""
    rows: dict[str, dict[str, float | None]] = {}
    for rate, cases in rates.items():
        for name, found in cases.items():
            row = rows.setdefault(name, {"KiB a step": found["counted_bytes"] / 2**10})
            seconds = min(found["round_s"])
            share = found["counted_bytes"] / (float(rate) * 1e6 / 8) / seconds
            told = share >= MOST
            row[f"s at {rate} Mbit/s"] = seconds if told else None
            row[f"link's share at {rate}"] = share if told else None
    return rows


def work(out: Path, rate: str) -> None:
    """This process's part at one rate, all cases. Collective."""
    cases = {name: {**PLAN["common"], "seed": 1, **PLAN["cases"][name]} for name in CASES}
    with open_group() as group:
        found = {}
        for name, ranks in every_run(group, cases, time_rounds):
            found[name] = ranks[0]
            if group.process.rank == 0:
                print(f"{rate} Mbit/s  {name}: {ranks[0]}", flush=True)
        if group.process.rank == 0:
            before = load_json(out, "record") if out.exists() else {}
            rates = {**before.get("rates", {}), rate: found}
            record = {
                "what": "seconds of a step of gpt2-tiny on two processes over a link of so many "
                "Mbit/s each way (network namespaces, veth, tc tbf), gloo, one thread each, on "
                "two cores that others used as well",
                **provenance("python results/lab/slow_links.py OUT.json"),
                "base": PLAN["common"],
                "cases": {name: PLAN["cases"][name] for name in CASES},
                "steps": {"warm_up": WARM_UP, "rounds": ROUNDS, "a_round": STEPS_A_ROUND},
                "load_average": os.getloadavg()[0],
                "seconds_a_step": summarize(rates),
                "rates": rates,
            }
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Start two processes for each rate, or be one of them."""
    parser = checkout.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", nargs="+", default=["2", "10"], help="Mbit/s each way")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(options.out, options.rates[0])
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise UserError("network namespaces take root, ip and tc", fix="use sudo; install iproute2")
    for rate in options.rates:
        # A small bucket: what is in it passes the link at once.
        command = ["bash", str(SCRIPT), f"{rate}mbit", str(Path(__file__))]
        command += [str(options.out.resolve()), "--rates", rate]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "BURST": "32kb"}).returncode
        if code:
            return code
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    checkout.run(main)
