"""Measure the models in distributed_training/models/hub/sizes.json again, from their configs in
this file: `python -m results.lab.planner_page.measure`. For a new model, add its name with the keys
`config` and `document`."""

import json

from pydantic_core import to_jsonable_python

from distributed_training.models.hub import SIZES_FILE, measure_size

lines = []
for name, size in json.loads(SIZES_FILE.read_text()).items():
    measured = to_jsonable_python(measure_size(size["config"]["document"]))
    lines.append(f"  {json.dumps(name)}: {json.dumps(measured)}")
SIZES_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
