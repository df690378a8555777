"""What training under the schedules came to, as `python -m pipedream` prints it."""

import importlib.util
from statistics import median
from typing import Any

from pipedream.draw.terminal import bold, print_wrapped
from pipedream.errors import UserError
from pipedream.schedules.orders import SCHEDULES

TRAINED = (
    "naive", "gpipe", "1f1b",
    "pipedream", "pipedream-no-stash", "pipedream-vertical", "pipedream-2bw",
)  # fmt: skip


def print_training(config: dict[str, Any]) -> None:
    """Train a small model under each weight policy, or under the schedule that was named."""
    name = config["schedule"]
    if name != "all" and name not in SCHEDULES:
        print("Not trained here: pipedream_runtime.py --schedule PATH trains under a CSV.")
        return
    if importlib.util.find_spec("torch") is None:
        print_wrapped(
            "torch is not installed in this Python; type python -m pip install -r "
            "requirements.txt in the tutorial's folder, or --set steps=0 to leave it out",
            "Not trained: ",
        )
        return
    title = (
        f"Trained: {config['layers_per_stage']} layers on each of {config['num_stages']} stages, "
        f"{config['steps']} batches of {config['num_microbatches']} microbatches, SGD at "
        f"{config['learning_rate']:g}"
    )
    print(
        f"{bold(title)}\n"
        f"{'':<24}{'loss at':>9}{'final':>10}{'gradient off at':>23}   weight versions\n"
        f"{'':<24}{'start':>9}{'loss':>10}{'its weights':>14}{'newest':>9}   by stage",
        flush=True,
    )
    import torch  # takes seconds, while the tables above are read

    from pipedream.train.oracle import final_loss, train_and_check

    torch.set_num_threads(1)
    settings = config | {"num_batches": config["steps"]}
    for one in TRAINED if name == "all" else [name]:
        title = SCHEDULES[one].title
        try:
            result, errors = train_and_check(one, every=3, **settings)
        except UserError as error:
            print_wrapped(f"{title}: {error}", "Not trained: ")
            continue
        loss = final_loss(result, config["num_microbatches"])
        end = "diverged" if result.diverged else f"{loss:.4f}"
        off = median(error.relative_error for error in errors)
        stale = median(error.staleness_error for error in errors)
        print(
            f"{title:<24}{result.losses[0]:>9.4f}{end:>10}{off:>14.2g}{stale:>9.2g}  ",
            *result.peak_versions,
            flush=True,  # the next one takes a second or two
        )
    print_wrapped(
        "final loss: mean of the last batches that hold every sample once. gradient off: what the "
        "backward passes gave against autograd through the whole model, relative; at the weights "
        "that the microbatch's own forward pass used, and at the newest ones, which are updated. "
        "Medians over every third microbatch."
    )
