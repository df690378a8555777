"""Measure the models in distributed_training/models/table.json again, from their configs in this
file: `python -m results.lab.planner_page.measure`. For a new model, add a line with the keys
`also`, `source` and `config`. Models with a formula (models/hub/dense.py) keep their config, and so
do models that are not supported."""

import json

from pydantic_core import to_jsonable_python

from distributed_training.models.hub import UnsupportedError, listed_size, measure_size
from distributed_training.models.table import TABLE
from distributed_training.settings.errors import UserError

lines = []
for name, entry in json.loads(TABLE.read_text()).items():
    document = entry.get("config") or entry["size"]["config"]["document"]
    kept = {"also": entry["also"], "source": entry["source"]}
    try:
        size = listed_size({"config": document})
        entry = kept | {"parameters": size.num_parameters, "config": document}
    except UserError:
        try:
            size = measure_size(document)
            measured = {"parameters": size.num_parameters, "size": to_jsonable_python(size)}
        except UnsupportedError as error:
            measured = {"refused": str(error), "config": document}
        entry = kept | measured
    lines.append(f"  {json.dumps(name)}: {json.dumps(entry)}")
TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
