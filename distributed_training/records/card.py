"""The model card of an exported folder; how all templates of pages/ are filled. No torch import."""

import shlex
from pathlib import Path
from typing import Any

from tabulate import tabulate

from distributed_training.data.corpus import WIKITEXT
from distributed_training.data.hub import WIKITEXT_ID
from distributed_training.models import find_model
from distributed_training.records.display import last_part
from distributed_training.records.record import BEST, Record, plural

CARD = "README.md"
_PUBLISHED_DATA: dict[str, Any] = {WIKITEXT: {"datasets": [WIKITEXT_ID], "language": "en"}}


def write_card(folder: Path, r: Record, repo_id: str | None = None) -> None:
    """Write README.md of `folder`, a run's hf/ or best/: YAML for the Hub, then what was trained on
    what, how, with which losses. `repo_id`: where on the Hub it will be."""
    from huggingface_hub import ModelCardData  # slow to import

    published = r.config["weights"] == "pretrained"
    front = ModelCardData(  # without license and language where they are not known
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=find_model(r.config["model"]).hub_id if published else None,
        **_PUBLISHED_DATA.get(r.config["dataset"], {}),
    )
    steps = r.step
    best = ""
    if folder.name == BEST and r.best is not None:
        steps = r.best["step"]
        best = ", of the lowest validation loss"
    losses = [
        (entry["step"], entry["loss"], entry["perplexity"])
        for entry in r.evaluations
        if entry["step"] in (0, steps)
    ]
    # Paths are nobody's business.
    settings = [(key, last_part(str(value))) for key, value in r.work.items()]
    text = fill(
        "card.md.jinja", r=r, repo_id=repo_id,
        folder=str(Path("runs", folder.parent.name, folder.name)),
        front=front.to_yaml(), steps=steps, best=best, strategy=r.layout_name,
        processes=plural(r.world_size, "process"), last_part=last_part, quote=shlex.quote,
        losses=tabulate(
            losses, ["step", "validation loss", "perplexity"], "github",
            floatfmt=("g", ".4f", ".2f"),
        ),
        settings=tabulate(settings, ["key", "value"], "github", disable_numparse=True),
    )  # fmt: skip
    (folder / CARD).write_text(text, encoding="utf-8")


def fill(template: str, **values: Any) -> str:
    """A template of pages/ with these values, which are escaped where it is HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow to import

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("pages")), autoescape=".html" in template,
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template(template).render(values)
