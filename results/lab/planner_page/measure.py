"""Measure the models in distributed_training/models/table.json again, from their configs in this
file: `python -m results.lab.planner_page.measure`. For a new model, add a line with the keys
`also`, `source` and `config`. Models with a formula (models/hub/dense.py) keep their config."""

import json

from pydantic_core import to_jsonable_python

from distributed_training.models.hub import listed_size, measure_size
from distributed_training.models.table import TABLE
from distributed_training.settings.errors import UserError

lines = []
for name, entry in json.loads(TABLE.read_text()).items():
    document = entry.get("config") or entry["size"]["config"]["document"]
    try:
        listed_size({"config": document})
    except UserError:
        size = to_jsonable_python(measure_size(document))
        entry = {"also": entry["also"], "source": entry["source"], "size": size}
    lines.append(f"  {json.dumps(name)}: {json.dumps(entry)}")
TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
